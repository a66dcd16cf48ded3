"""The evaluation of the benchmarks of frame mode."""

import json

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmark.collapse import WORKLOADS, summary
from benchmark.endurance import Options
from benchmark.endurance import summary as endured
from benchmark.frames.sounds import endless_sounds
from benchmark.frames.stream import FrameRow, Stream
from benchmark.frames.watch import predicted_s, saturated_s


def pool(*shares: float) -> list[dict]:
    return [{"at_s": float(n), "share": share} for n, share in enumerate(shares)]


def row(due_s: float, latency_ms: float | None = 10.0, outcome: str = "on_time") -> FrameRow:
    return FrameRow(0, 0, due_s, due_s, latency_ms, outcome)


def test_a_linear_fit_of_the_early_part_predicts_when_the_pool_is_full():
    samples = pool(0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.9, 1.0)
    assert predicted_s(samples) == pytest.approx(9.5)
    assert saturated_s(samples) == 7.0


def test_a_pool_that_stays_half_empty_has_no_prediction():
    samples = pool(0.1, 0.3, 0.4, 0.4)
    assert predicted_s(samples) is None and saturated_s(samples) is None


def test_a_run_without_empty_frames_has_not_collapsed():
    found = summary([row(1), row(2, 900.0, "late")], [], pool(0.1), [])
    assert not found["collapsed"] and found["late"] == 1
    assert found["latency_ms"]["p50"] == pytest.approx(455)
    assert found["latency_by_age_ms"] == [{"from_s": 0, "n": 2, "p50": 455, "p99": 891.1}]


@pytest.mark.parametrize(
    ("rows", "lost"),
    [
        ([row(1), row(3, None, "empty")], []),
        ([row(1), row(3, None, "dropped")], []),
        ([row(1)], [row(3, None, "unanswered")]),
    ],
)
def test_a_frame_without_a_result_is_a_collapse(rows, lost):
    found = summary(rows, lost, pool(0.5), [])
    assert found["collapsed"] and found["stalled_s"] == 3


def test_sent_audio_without_a_result_is_counted_in_frames():
    stream = Stream(0, "", "", {"frame_ms": 80}, None)
    stream._sent_s = [100.0 + 0.04 * n for n in range(10)]
    stream._answered = 160
    assert [round(r.due_s, 2) for r in stream.unanswered(100.0)] == [0.2, 0.28, 0.36]


def test_every_sound_has_the_level_of_its_name():
    sounds = endless_sounds(WORKLOADS / "clips", seed=1)
    level_db = {
        name: 20 * np.log10(max(np.sqrt(np.mean((sound / 32768.0) ** 2)), 1e-9))
        for name, sound in sounds.items()
    }
    assert level_db["silence"] == -180
    assert level_db["near silence"] == pytest.approx(-66, abs=1)
    assert all(-40 < level_db[name] < -10 for name in ("speech", "overlap", "noise", "music"))
    again = endless_sounds(WORKLOADS / "clips", seed=1)
    assert all(np.array_equal(again[name], sound) for name, sound in sounds.items())


def streams(*outcomes: list[FrameRow]) -> list[Stream]:
    made = []
    for number, rows in enumerate(outcomes):
        stream = Stream(number, "", "", {"frame_ms": 960}, None)
        stream.rows = rows
        made.append(stream)
    return made


def test_frames_without_result_after_a_kill_are_counted_separately():
    rows = [row(5), row(11, None, "empty"), row(13), row(30, None, "empty"), row(39)]
    options = Options(seconds=42, kills="thinker@10", back_s=10)
    found = endured({0: "speech"}, streams(rows), 0.0, [(0.0, 100.0), (20.0, 110.0)], options)
    assert found["without_result"] == 1
    assert found["without_result_while_a_stage_was_away"] == 1
    assert found["away_s"] == [pytest.approx(3.01)]
    assert found["alive_at_the_end"] == 1
    assert found["by_minute"][0]["memory_mib"] == 105


def test_a_session_without_recent_results_is_not_alive():
    options = Options(seconds=42)
    found = endured({0: "speech", 1: "music"}, streams([row(39)], [row(20)]), 0.0, [], options)
    assert found["alive_at_the_end"] == 1


@pytest.mark.parametrize("with_reason", [True, False])
async def test_a_session_that_the_server_rejects_is_refused(with_reason):
    async def reject(socket: ServerConnection) -> None:
        if with_reason:
            await socket.send(json.dumps({"type": "error", "error": {"code": "server_overloaded"}}))
        await socket.close(1013, "server_overloaded")

    async with serve(reject, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        stream = Stream(0, f"ws://127.0.0.1:{port}/", "demo", {"frame_ms": 960}, None)
        await stream.run(began_s=0.0, until_s=0.0)
    assert stream.refused and not stream.rows
