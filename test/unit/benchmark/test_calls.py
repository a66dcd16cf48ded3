"""Calls beside sessions of sockets: what is said when, what a network does, what is found."""

import asyncio
import random
from dataclasses import asdict

import numpy as np
import pytest

from benchmark.call_tables import call_table, outside_lines, word_table
from benchmark.call_users import CLEARED, STARTED, Network, Script, User, Utterance
from benchmark.calls import Arm, Options, drift_ms, first_sounds_s, sound_stops_s, stops_s
from benchmark.third_party.run_full_duplex_bench import Player
from benchmark.words_over_calls import script_of
from sglang_live.client import clip

SPEECH = np.random.default_rng(1).normal(0, 4000, 24_000).astype("<i2").tobytes()
SCRIPT = Script((b"",) * 500, (Utterance(50, 100, False), Utterance(200, 300, True)))


def user(**found) -> User:
    """One that has said the script twice."""
    return User(SCRIPT, 0, began_s=0.0, n_sent=1000, **found)


def test_every_second_utterance_interrupts_and_a_pause_is_as_long_as_a_response():
    script = Script.of([SPEECH] * 4, reply_s=6.0)
    assert [one.interrupts for one in script.utterances] == [False, True, False, True]
    begins = np.array([one.begin for one in script.utterances])
    assert list(np.diff(begins) * clip.FRAME_S) == pytest.approx([3.5, 9.5, 3.5])
    assert all(one.end - one.begin == pytest.approx(50, abs=3) for one in script.utterances)
    assert {len(frame) for frame in script.frames} == {clip.FRAME_BYTES}


def test_what_was_said_counts_from_the_users_own_first_frame():
    assert SCRIPT.said_until(1000, 0) == [
        (1.0, 2.0, False), (4.0, 6.0, True), (11.0, 12.0, False), (14.0, 16.0, True)
    ]  # fmt: skip
    # One that begins within an utterance has not said it.
    assert SCRIPT.said_until(500, 250) == [(6.0, 7.0, False)]
    assert SCRIPT.said_until(250, 0) == [(1.0, 2.0, False)]


def test_the_first_sound_after_an_utterance_is_of_its_response():
    one = user(sounds=[0.5, 2.6, 2.7, 4.1, 6.5, 13.0, 14.1])
    assert first_sounds_s(one) == pytest.approx([0.6, 0.5, 1.0])


def test_a_stop_is_the_event_and_the_last_sound_after_an_interruption():
    events = [(1.4, STARTED, 900), (4.7, STARTED, 3900), (4.8, CLEARED, None), (18, CLEARED, None)]
    one = user(sounds=[3.9, 4.1, 4.3, 4.5, 6.5, 12.5], events=events)
    assert stops_s(one, CLEARED) == pytest.approx([0.8])
    assert stops_s(one, STARTED) == pytest.approx([0.7])
    assert sound_stops_s(one) == pytest.approx([0.5])


def test_drift_is_between_the_first_third_and_the_last():
    found_ms = [(1.4, 1000 + 40), (4.4, 4000 + 40), (11.4, 11_000 + 90), (14.4, 14_000 + 110)]
    events = [(came_s, STARTED, at_ms) for came_s, at_ms in found_ms]
    assert drift_ms([user(events=events)]) == 70.0
    assert drift_ms([user(events=events[:2])]) is None


async def test_a_network_loses_of_both_ways_and_delays_those_of_the_user():
    class Ice:
        def __init__(self) -> None:
            self.sent: list[int] = []
            self.left = list(range(4000))

        async def _send(self, data: int) -> None:
            self.sent.append(data)

        async def _recv(self) -> int:
            if not self.left:
                raise ConnectionError
            return self.left.pop(0)

    ice = Ice()
    Network(0.1, 0.02).spoil(ice, random.Random(1))
    for number in range(4000):
        await ice._send(number)
    while len(asyncio.all_tasks()) > 1:  # some are on the way
        await asyncio.sleep(0.01)
    assert len(ice.sent) == pytest.approx(3600, abs=80)
    assert ice.sent != sorted(ice.sent)
    received = []
    with pytest.raises(ConnectionError):
        while True:
            received.append(await ice._recv())
    assert len(received) == pytest.approx(3600, abs=80)
    assert received == sorted(received)


def test_texts_are_said_one_after_another_with_time_for_their_transcripts():
    script = script_of([SPEECH, SPEECH])
    first, second = script.utterances
    assert first.begin * clip.FRAME_S == pytest.approx(1.0, abs=0.06)
    assert (second.begin - first.begin) * clip.FRAME_S == pytest.approx(4.0)


@pytest.mark.parametrize("losses", ["1", "-0.1", "0,2"])
def test_losses_are_shares(losses):
    with pytest.raises(ValueError, match="share"):
        Options(losses=losses)
    [none, some] = Options(losses="0,0.02", jitter_ms=100).networks
    assert (none.jitter_s, some.jitter_s) == (0.0, 0.1)


def test_a_player_plays_at_the_pace_of_time_and_stops_where_the_user_speaks():
    player = Player()
    player._waiting += SPEECH
    for _ in range(10):
        player.tick()
    player.take({"type": STARTED})
    for _ in range(10):
        player.tick()
    assert list(player.speaks()) == [True] * 10 + [False] * 10


# --- tables ---

SOURCE = {"device": "cpu", "git_commit": "0123456789ab"}
ARM = Arm(
    transport="webrtc", loss=0.02, jitter_ms=100.0, gateway_ms_per_s=3.26, calls_ms_per_s=9.54,
    gateway_mb=[200.0, 201.0], calls_mb=[80.0, 84.4], n_utterances=40, n_found=39, drift_ms=None,
    first_sound_ms=[900.0, 1100.4], stop_ms=[300.0, 400.0], sound_stop_ms=[], late_share=0.001,
)  # fmt: skip


def test_the_newest_document_of_each_number_of_calls_has_its_table():
    def document(calls: int, **changed) -> dict:
        options = asdict(Options(calls=calls, seconds=600.0))
        return {**SOURCE, "options": options, "arms": [{**asdict(ARM), **changed}]}

    lines = call_table([document(10), document(10, loss=0.5), document(2)])
    rows = [line for line in lines if "webrtc" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| 2", "| 10"]
    assert rows[1] == (
        "| 10 | webrtc | 2 %, 100 ms | 3.3 ms | 9.5 ms | 200, 201 MB | 80, 84 MB | 39 of 40 | n/a "
        "| 900 / 1100 ms | 300 / 400 ms | n/a | 0.1 % |"
    )
    assert "10 calls, 10 min an arm. cpu, commit 012345678." in lines
    assert call_table([]) == []


def test_words_have_a_row_per_loss_and_others_benchmarks_a_line_each():
    arm = {"loss": 0.1, "jitter_ms": 100.0, "heard": ["a", "b"], "n_equal": 1, "words": 8}
    assert word_table({**SOURCE, "arms": [{**arm, "errors": 1}]})[-1] == (
        "| 10 %, 100 ms | 2 | 1 | 12.5 % |"
    )
    stats = {"count": 3, "p50": 700.0, "p90": 800.0}
    summary = {
        "response_latency_ms": stats, "barge_in_stop_ms": stats, "barge_in_success_rate": 1.0,
        "false_barge_ins": 0, "noise_turns": 1, "missed_responses": 0, "mean_wer": None,
    }  # fmt: skip
    turns = {"turn_latency": {"e2e_p50_ms": 650.0}}
    result = {
        "samples": 1, "probe": turns, "median_barge_in_stop_ms": 250.0, "task_completion": 1.0,
        "fact_coverage": 0.5, "mean_wer": 0.0,
    }  # fmt: skip
    unscored = {**result, "samples": 0}
    sessions = [{"result": result}, {"result": unscored}]
    row = {"task": "smooth_example", "name": "1", "takes_turn": True, "latency_s": 0.8}
    rows = outside_lines(
        {**SOURCE, "suite": "voicebench 0.2.0", "summary": summary},
        {**SOURCE, "suite": "voice-evals 0.2.1", "sessions": sessions},
        {**SOURCE, "suite": "Full-Duplex-Bench 1.0", "rows": [row]},
    )
    assert rows == [
        "- voicebench 0.2.0: answer 700 / 800 ms (n = 3), stop 700 / 800 ms (n = 3); "
        "100.0 % of interruptions stop it, and 0 of 1 noises; n/a word errors",
        "- voice-evals 0.2.1, 1 of 2 calls scored: answer 650 ms, stop 250 ms, 100.0 % of "
        "tasks, 50.0 % of facts, 0.0 % word errors",
        "- Full-Duplex-Bench 1.0, its three public examples: smooth after 0.80 s",
        "",
        "cpu, commit 012345678.",
    ]
    assert outside_lines(None, None, None) == []
