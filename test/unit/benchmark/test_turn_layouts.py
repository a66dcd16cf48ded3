"""Each layout of files is read as its authors describe it, from tiny made files."""

import json

import numpy as np
import pytest
import soundfile

from benchmark.turn_taking import clips, layouts
from benchmark.turn_taking.timeline import Span

RATE = 16000


def write_sound(path, *voiced_s: tuple[float, float], lasts_s: float) -> None:
    """A buzz at the given times in a quiet room."""
    rng = np.random.default_rng(0)
    sound = rng.normal(0, 1e-4, int(lasts_s * RATE))
    for start_s, end_s in voiced_s:
        part = slice(int(start_s * RATE), int(end_s * RATE))
        sound[part] += 0.2 * rng.standard_normal(part.stop - part.start)
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound, RATE)


def read(layout: str, folder):
    """Both splits together."""
    found = [layouts.READERS[layout]([folder], split, 1) for split in clips.SPLITS]
    return [r for one, _ in found for r in one], [s for _, one in found for s in one]


def test_eot_bench(tmp_path):
    write_sound(tmp_path / "audio/u1.wav", (0, 1.0), (1.5, 2.0), (2.15, 3.0), lasts_s=3.5)
    spans = [(1.0, 1.5), (2.0, 2.15), (3.0, 3.5)]
    row = {
        "id": "u1",
        "language": "en",
        "audio": "audio/u1.wav",
        "silence_spans": [{"start": start, "end": end} for start, end in spans],
    }
    (tmp_path / "validation.jsonl").write_text(json.dumps(row) + "\n")
    [recording], stimuli = read("eot-bench", tmp_path)
    [turn] = recording.turns
    assert stimuli == []
    assert (recording.source, turn.end_ms, turn.pauses) == ("en", 3000, (Span(1000, 1500),))
    assert turn.until_ms == 3500 + clips.GAP_MS


def test_full_duplex_bench_pauses_and_turns(tmp_path):
    pause, turn = tmp_path / "candor_pause_handling/1", tmp_path / "candor_turn_taking/2"
    write_sound(pause / "input.wav", (0, 1), (1.6, 2.4), lasts_s=3)
    (pause / "pause.json").write_text('[{"text": "[PAUSE]", "timestamp": [1.0, 1.6]}]')
    write_sound(turn / "input.wav", (0.2, 1.5), (2, 3), lasts_s=3)
    (turn / "turn_taking.json").write_text('[{"text": "[TURN]", "timestamp": [1.5, 1.7]}]')
    recordings, _ = read("full-duplex-bench", tmp_path)
    by_task = {recording.source: recording.turns[0] for recording in recordings}
    assert by_task["candor_pause_handling"].pauses == (Span(1000, 1600),)
    assert not by_task["candor_pause_handling"].ends
    ended = by_task["candor_turn_taking"]
    # What follows the turn is the other speaker, who is replaced by silence.
    assert (ended.end_ms, ended.until_ms) == (1500, 1500 + clips.GAP_MS)


def test_full_duplex_bench_sounds_over_the_agent(tmp_path):
    cut, mm = tmp_path / "v1.0/synthetic_user_interruption/1", tmp_path / "v1.5/user_backchannel/1"
    write_sound(cut / "input.wav", (0, 1), (3, 4), lasts_s=6)
    row = {"context": "Tell me.", "interrupt": "Stop.", "timestamp": [3.0, 4.0]}
    (cut / "interrupt.json").write_text(json.dumps([row]))
    write_sound(mm / "input.wav", (0, 1), (3, 3.5), lasts_s=5)
    (mm / "metadata.json").write_text('{"backchannel_text": "uh huh", "timestamps": [3.0, 3.5]}')
    _, stimuli = read("full-duplex-bench", tmp_path)
    seen = {s.kind: (s.onset_ms, len(s.pcm) / RATE) for s in stimuli}
    assert seen == {"interruption": (1000, 3.0), "backchannel": (1000, 2.5)}


def test_ami_channels_and_words(tmp_path):
    write_sound(tmp_path / "ES1.A.wav", (1, 1.5), (2, 3), lasts_s=6)
    write_sound(tmp_path / "ES1.B.wav", (2.2, 2.5), lasts_s=6)
    own = [("so", 1.0, 1.5), ("there", 2.0, 3.0)]
    (tmp_path / "ES1.A.words.xml").write_text(_nxt(own))
    (tmp_path / "ES1.B.words.xml").write_text(_nxt([("Mm-hmm", 2.2, 2.5)]))
    [recording], [stimulus] = read("ami", tmp_path)
    [turn] = recording.turns
    assert recording.group == stimulus.group == "ES1"
    assert [pause.lasts_ms for pause in turn.pauses] == [500]
    assert turn.end_ms - turn.start_ms == 2000
    assert (stimulus.kind, stimulus.onset_ms) == ("backchannel", 1000)


def _nxt(words: list[tuple[str, float, float]]) -> str:
    """As the corpus writes it, with a full stop and a laugh."""
    rows = "".join(f'<w starttime="{s}" endtime="{e}">{text}</w>' for text, s, e in words)
    stop = f'<w starttime="{words[-1][2]}" endtime="{words[-1][2]}" punc="true">.</w>'
    root = 'xmlns:nite="http://nite.sourceforge.net/"'
    return f'<nite:root {root}>{rows}{stop}<vocalsound type="other"/></nite:root>'


def test_clips_with_a_manifest(tmp_path):
    write_sound(tmp_path / "one.flac", (0.2, 1.0), (1.5, 2.5), lasts_s=3)
    write_sound(tmp_path / "two.flac", (0.5, 2.5), (3, 3.5), (4.5, 6), lasts_s=7)
    segments = [[0.5, 2.0, "p"], [3.0, 0.5, "q"], [4.5, 1.5, "q"]]
    rows = [
        {"file": "audio/one.flac", "kind": "speech", "speakers": ["s"]},
        {"file": "audio/two.flac", "kind": "multiparty", "speakers": [], "segments": segments},
    ]
    (tmp_path / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recordings, stimuli = read("clips", tmp_path)
    by_name = {recording.name: recording for recording in recordings}
    assert by_name.keys() == {"s/0", "two/p", "two/q"}
    [drawn] = by_name["s/0"].turns
    [pause] = drawn.pauses
    assert drawn.end_ms - drawn.start_ms == pytest.approx(1800 + pause.lasts_ms)
    [meeting] = by_name["two/p"].turns
    assert meeting.ends and meeting.end_ms - meeting.start_ms == pytest.approx(2000, abs=20)
    kinds = {stimulus.kind for stimulus in stimuli}
    assert {"interruption", "side_talk", "keyboard_synthetic", "echo -20 dB 100 ms"} <= kinds


def test_a_split_is_fixed_by_the_name():
    assert [clips.split_of(name) for name in ("jfk", "librivox-austen")] == ["tune", "held_out"]
