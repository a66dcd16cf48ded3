"""Write the tables and the chart of benchmark/notes/turn_taking.md from its newest documents.

python -m benchmark.turn_taking.page
"""

from benchmark.summary import BEGIN, END, RESULTS, ROOT, newest
from benchmark.turn_taking.chart import draw
from benchmark.turn_taking.other_voices import tables as other_voices_tables
from benchmark.turn_taking.report import (
    INTERRUPTION_HEAD,
    SHARE_HEAD,
    end_table,
    interruption_table,
    share_table,
)
from sglang_live.interaction.vad import VadSettings

PAGE = ROOT / "benchmark" / "notes" / "turn_taking.md"
OTHER_VOICES = "<!-- other_voices:begin -->", "<!-- other_voices:end -->"
CHART = ROOT / "benchmark" / "notes" / "img" / "turn_taking.svg"


def measured(document: dict) -> str:
    """The text between the markers of the page."""
    names = sorted({recording["name"].split("/")[0] for recording in document["recordings"]})
    lines = [
        f"{document['device']}, commit {document['git_commit'][:9]}, split "
        f"`{document['config']['split']}`: {', '.join(names)}.",
        "",
        "**Ends of turns**, meetings and dialogues together:",
        "",
        *end_table(document["ends"]),
        "",
        SHARE_HEAD,
        "",
        *share_table(document["delays_at_false_cutoffs"]),
        "",
        INTERRUPTION_HEAD,
        "",
        *interruption_table(document["interruptions"], VadSettings().confirm_ms),
    ]
    return "\n".join(lines)


def other_voices(document: dict) -> str:
    """The text between the markers of the section on other voices."""
    lines = [
        f"{document['device']}, commit {document['git_commit'][:9]}, split "
        f"`{document['config']['split']}`, error rates over both splits.",
        "",
        *other_voices_tables(document),
    ]
    return "\n".join(lines)


def _replaced(page: str, markers: tuple[str, str], text: str) -> str:
    begin, end = markers
    before, rest = page.split(f"{begin}\n")
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def main() -> None:
    document = newest(RESULTS, "turn_taking")
    assert document is not None, "no document: run python -m benchmark.turn_taking --json first"
    page = _replaced(PAGE.read_text("utf-8"), (BEGIN, END), measured(document))
    voices = newest(RESULTS, "other_voices")
    assert voices is not None, "no document: run python -m benchmark.turn_taking.other_voices first"
    PAGE.write_text(_replaced(page, OTHER_VOICES, other_voices(voices)), "utf-8")
    draw(document["ends"], CHART)


if __name__ == "__main__":
    main()
