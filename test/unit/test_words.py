"""Code, tests and docs use plain words: those of docs/glossary.md, not those that it replaces.

A word that stands here in a list is found in any case, alone, inside an identifier and across a
line break. Names of files are searched too.
"""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Vague persons, literary quantities, metaphors, and words that docs/glossary.md replaces.
WORDS = """
    nobody, somebody, anybody, everybody, whoever, whomever, for ever, so much, so many,
    in the same breath, makes its way, caller, callers,
    take in, takes in, taken in, taking in, took in, takes it in,
    sit out, sits out, sitting out, sat out,
    give back, gives back, giving back, given back, gave back,
    give way, gives way, giving way, given way, gave way,
    put back, puts back, putting back, half way,
    door, doors, neighbour, neighbours, stranger, strangers,
    habit, habits, beat, beats, guess, guesses, guessed, guessing, outlook, outlooks,
    side lane, side lanes, head start, head starts, headstart, nextuse, turnprefill, ahead s
"""
# Former names of classes, messages, policies, flags and metrics; found as whole identifiers.
IDENTIFIERS = """
    BeatsConfig BeforeSpeech BoundNative CallItem ControlChannel DeadlyIds EndReply FrameCall
    HeldReply HostRoom IdleCallError NativeBounded ReplyItem SessionCuts SpeakDone SpeakText
    SpeechCutError SpokenPieces StageNotes StreamNote StreamNotes ThinkDone TooManyCallsError
    TurnEnds UserTranscripts VoiceDone VoiceEnd VoiceFrames WritesCall
    audio_held_s audio_held_seconds beat_s bound_native deadly_ids end_reply forget_if_cut
    frame_call frames_cut guesses_total idle-call-s idle_call_s join_beat leave_beat
    max-answers-per-minute max_answers_per_minute max_hold_s max_put_back_s max_side_responses
    may_park_prefill plays_for_s policy_cut_s policy_ended policy_frames_cut policy_held_now
    policy_holds policy_put_backs policy_replies_cut policy_returns policy_sessions_cut
    policy_sessions_gave_way policy_tokens_cut policy_tokens_given_back replies_cut reply_gap_s
    report_outlook result_beside saw_gap_s sessions_cut speech_cut stream_notes tokens_cut
    turn-piece-s turn_end_verdict_s turn_end_verdicts turn_piece_s user_transcripts who_sits_out
    UNHEARD_PREFIX listened unheard-chunk-frames unheard_chunk_frames
"""
EXCEPTIONS = {
    ("CHANGELOG.md", ""): "names what was renamed",
    ("docs/glossary.md", ""): "its right column names the words",
    ("test/unit/test_words.py", ""): "lists the words",
    ("benchmark/third_party/run_voice_evals.py", "caller"): "a word of that benchmark",
    ("test/e2e/test_tenants.py", "caller"): "a prompt, whose number of tokens is part of the test",
    ("training/demo/unknown_sentences.py", "nobody"): "a word of the training corpus",
    ("training/demo/unknown_sentences.py", "neighbour"): "a word of the training corpus",
}
# Corpora, recordings' texts, measured results, generated files and licences are not our prose.
NOT_OURS = (
    "LICENSE",
    "NOTICE",
    "benchmark/results/",
    "benchmark/workloads/",
    "python/sglang_live/interaction/turn_words.json",
    "python/sglang_live/models/demo/corpus.txt",
    "python/sglang_live/models/demo/trained/",
    "requirements/locked/",
    "test/data/",
    "training/demo/words.toml",
    "training/demo/world.toml",
)


# Between two words of a phrase: spaces, a line break with a comment's sign, `_`, `-`.
_GAP = r"[\s_#/*-]+"
_PHRASES = "|".join(_GAP.join(phrase.split()) for phrase in WORDS.split(","))
_WORD = re.compile(rf"(?<![a-z])(?:{_PHRASES})(?![a-z])", re.IGNORECASE)
_IDENTIFIER = re.compile(rf"\b(?:{'|'.join(IDENTIFIERS.split())})\b")
_INNER_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [name for name in names if not name.startswith(NOT_OURS)]


def found_in(text: str) -> list[tuple[int, str]]:
    """Line number and word of each banned word in the text."""
    lines = [(text.count("\n", 0, m.start()) + 1, m[0]) for m in _IDENTIFIER.finditer(text)]
    apart = _INNER_CAPITAL.sub("_", text)
    for match in _WORD.finditer(apart):
        word = re.sub(_GAP, " ", match[0].lower())
        lines.append((apart.count("\n", 0, match.start()) + 1, word))
    return sorted(lines)


def banned_in(name: str) -> list[tuple[int, str]]:
    try:
        text = (ROOT / name).read_text()
    except UnicodeDecodeError:
        text = ""
    return [(0, word) for _, word in found_in(name)] + found_in(text)


def excepted(name: str, word: str) -> bool:
    return (name, word) in EXCEPTIONS or (name, "") in EXCEPTIONS


def test_no_file_uses_a_banned_word():
    banned = [
        f"{name}:{line}: {word}"
        for name in files()
        for line, word in banned_in(name)
        if not excepted(name, word)
    ]
    assert banned == [], "\n".join(banned)


@pytest.mark.parametrize(("name", "word"), EXCEPTIONS)
def test_every_exception_is_needed(name, word):
    words = [found for _, found in banned_in(name)]
    assert word in words if word else words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# For\n    # ever.", [(1, "for ever")]),
        ("def test_nobody_hears():", [(1, "nobody")]),
        ("class SideLanes:\n    Neighbours", [(1, "side lanes"), (2, "neighbours")]),
        ("indoors, blend, a beaten habitat, some put backups", []),
        ("SpeakDone(plays_for_s=1)", [(1, "SpeakDone"), (1, "plays_for_s")]),
    ],
)
def test_words_are_found_alone_in_identifiers_and_across_lines(text, found):
    assert found_in(text) == found


if __name__ == "__main__":
    for name in files():
        for line, word in banned_in(name):
            if not excepted(name, word):
                print(f"{name}:{line}: {word}")
