"""The fit of turn_words.json reads the corpus as published, and finds what breaks sentences off."""

from pathlib import Path

from training.turn_end.words import figures_of, fitted, read_silences


def write_words(path: Path, words: list[tuple[str, float, float]]) -> None:
    """words: each with its times in seconds; one with a full stop behind it ends a sentence."""
    rows = []
    for text, start_s, end_s in words:
        rows.append(f'<w starttime="{start_s}" endtime="{end_s}">{text.rstrip(".")}</w>')
        if text.endswith("."):
            rows.append(f'<w starttime="{end_s}" endtime="{end_s}" punc="true">.</w>')
    xml = f'<nite:root xmlns:nite="http://nite.sourceforge.net/">{"".join(rows)}</nite:root>'
    path.write_text(xml)


def meeting(folder: Path, name: str) -> None:
    own = [
        ("We", 0.0, 0.2),
        ("could", 0.2, 0.5),
        ("and", 0.5, 0.8),
        ("then", 1.6, 1.8),
        ("go.", 1.8, 2.2),
        ("Good.", 3.0, 3.3),
    ]
    write_words(folder / f"{name}.A.words.xml", own)
    write_words(
        folder / f"{name}.B.words.xml", [("Mm-hmm", 1.0, 1.2), ("I", 4, 4.2), ("go.", 4.2, 5)]
    )


def test_silences_are_those_behind_words_and_know_their_punctuation(tmp_path):
    meeting(tmp_path, "ES1a")
    found = read_silences(tmp_path)
    assert [(one.words[-1], one.complete, one.is_end) for one in found] == [
        ("and", False, False),
        ("go", True, False),
        ("good", True, True),
        ("go", True, True),
    ]
    assert {one.group for one in found} == {"ES1"}
    assert found[1].words == ("we", "could", "and", "then", "go")


def test_words_that_occur_in_many_groups_get_their_weights(tmp_path):
    for number in range(12):
        meeting(tmp_path, f"ES{number}a")
    silences = read_silences(tmp_path)
    fit = fitted(silences)
    assert fit.log_odds(("we", "could", "and")) < 0 < fit.log_odds(("then", "go"))
    figures = figures_of(fit, silences)
    assert figures["auc_of_complete_sentences"] == 1
    assert figures["share_of_pauses_below"]["0.5"] == 0.5 and figures["ends"] == 24
