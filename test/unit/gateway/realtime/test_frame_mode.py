"""Frame mode: the turn of each frame, its frame.done, and failures."""

import asyncio
from dataclasses import replace

import pytest

from sglang_live.clock import SimClock
from sglang_live.core import TranscriptDelta
from sglang_live.errors import StageFailedError
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    connected,
    done,
    history_item_of,
    services,
    tone,
)

FRAMES = {"type": "frames", "frame_ms": 160, "max_tokens": 3}
FRAME = tone(160)


def wrote(text: str, gone: tuple[str, ...] = ()):
    reply = replace(history_item_of(text), key=f"reply:{text}")
    return [TranscriptDelta(text, 1), done(item=reply, gone=gone)]


def asked(orchestrator) -> list[list[str]]:
    """The roles in the history of each turn."""
    return [[item.role for item in turn.history] for turn in orchestrator.turns]


async def in_frames(client, mode=FRAMES) -> dict:
    client.turn_detection(mode)
    updated = await client.expect("session.updated")
    # What the resampler keeps to itself.
    client.append(tone(40))
    return updated["session"]["audio"]["input"]["turn_detection"]


async def test_every_frame_is_prefilled_and_ends_with_frame_done():
    orchestrator = FakeOrchestrator(scripts=[wrote("a"), wrote("b"), wrote("c")])
    async with connected(orchestrator) as client:
        assert await in_frames(client) == FRAMES
        client.append(tone(400))
        frames = [await client.expect("frame.done") for _ in range(2)]
        client.append(tone(80))
        frames.append(await client.expect("frame.done"))
    assert [frame["text"] for frame in frames] == ["a", "b", "c"]
    assert [frame["frame_index"] for frame in frames] == [0, 1, 2]
    assert [(f["audio_start_ms"], f["audio_end_ms"]) for f in frames] == [
        (0, 160),
        (160, 320),
        (320, 480),
    ]
    assert {frame["outcome"] for frame in frames} == {"on_time"}
    assert asked(orchestrator) == [
        ["user"],
        ["user", "assistant", "user"],
        ["user", "assistant"] * 2 + ["user"],
    ]
    turn = orchestrator.turns[-1]
    assert (turn.wants_audio, turn.max_output_tokens, turn.frame_s) == (False, 3, 0.16)
    assert len(turn.history[-1].parts[0].pcm) == 160 * 16
    assert (
        orchestrator.session.frame_modes[:1] == [0.16]
        and orchestrator.session.frame_modes[-1] is None
    )


async def test_the_conversation_so_far_comes_before_the_frames():
    orchestrator = FakeOrchestrator(scripts=[wrote("a")])
    async with connected(orchestrator) as client:
        client.say("I am Ada.")
        for _ in range(2):
            await client.next()
        await in_frames(client)
        client.append(FRAME)
        await client.expect("frame.done")
    assert asked(orchestrator) == [["user", "user"]]


async def test_compacted_frames_leave_the_history():
    async with connected(orchestrator := FakeOrchestrator()) as client:
        orchestrator.scripts.append(wrote("a"))
        await in_frames(client)
        client.append(FRAME)
        await client.expect("frame.done")
        first = orchestrator.turns[0].history[0].key
        orchestrator.session.scripts += [wrote("b", gone=(first, "reply:a")), wrote("c")]
        for _ in range(2):
            client.append(FRAME)
            await client.expect("frame.done")
    assert [len(turn.history) for turn in orchestrator.turns] == [1, 3, 3]


async def test_a_frame_that_fails_is_empty_and_the_next_is_prefilled():
    scripts = [[StageFailedError("gone")], [ValueError("bug")], wrote("c")]
    orchestrator = FakeOrchestrator(scripts=scripts)
    async with connected(orchestrator) as client:
        await in_frames(client)
        frames = []
        for _ in range(3):
            client.append(FRAME)
            frames.append(await client.expect("frame.done"))
    assert [frame["outcome"] for frame in frames] == ["empty", "empty", "on_time"]
    assert [(frame["error"] or {}).get("code") for frame in frames] == [
        "stage_failed",
        "internal_error",
        None,
    ]
    assert asked(orchestrator) == [["user"]] * 3


async def test_a_frame_that_comes_after_the_next_is_late_and_old_ones_are_dropped():
    clock, gate = SimClock(), asyncio.Event()
    orchestrator = FakeOrchestrator(scripts=[[gate, *wrote("a")]])
    async with connected(orchestrator, services(orchestrator, clock=clock)) as client:
        await in_frames(client)
        client.append(FRAME)
        await asyncio.sleep(0.01)
        client.append(tone(160 * 6))  # four may wait
        dropped = [await client.expect("frame.done") for _ in range(2)]
        clock.advance(0.2)
        gate.set()
        late = [await client.expect("frame.done") for _ in range(5)]
    assert [(f["frame_index"], f["outcome"]) for f in dropped] == [(1, "dropped"), (2, "dropped")]
    assert [f["frame_index"] for f in late] == [0, 3, 4, 5, 6]
    assert {f["outcome"] for f in late} == {"late"}
    assert late[0]["latency_ms"] == pytest.approx(200, abs=1)


async def test_missing_audio_is_counted():
    clock = SimClock()
    orchestrator = FakeOrchestrator(scripts=[wrote("a"), wrote("b")])
    shared = services(orchestrator, clock=clock)
    async with connected(orchestrator, shared) as client:
        await in_frames(client)
        client.append(FRAME)
        assert (await client.expect("frame.done"))["missing_before"] == 0
        clock.advance(0.5)
        client.append(FRAME)
        assert (await client.expect("frame.done"))["missing_before"] == 2
    assert shared.metrics.frames_missing._value.get() == 2


async def test_there_are_no_turns_in_frame_mode_and_there_are_after_it():
    async with connected(orchestrator := FakeOrchestrator(scripts=[wrote("a")])) as client:
        await in_frames(client)
        for event in ("response.create", "input_audio_buffer.commit"):
            client.send(event)
            assert (await client.expect("error"))["error"]["code"] == "frame_mode"
        client.append(tone(80))
        client.send("input_audio_buffer.clear")
        await client.expect("input_audio_buffer.cleared")
        client.append(tone(200))
        frame = await client.expect("frame.done")
        assert frame["audio_end_ms"] - frame["audio_start_ms"] == 160
        assert frame["audio_start_ms"] >= 100
        assert await in_frames(client, None) is None
        client.append(FRAME)
        client.send("input_audio_buffer.commit")
        await client.expect("input_audio_buffer.committed")
    assert len(orchestrator.turns) == 1


async def test_frame_mode_cannot_begin_while_a_response_is_made():
    gate = asyncio.Event()
    async with connected(FakeOrchestrator(scripts=[[gate, done("x")]])) as client:
        client.say("Hello.")
        client.send("response.create")
        while (await client.next())["type"] != "response.created":
            pass
        client.turn_detection(FRAMES)
        error = (await client.expect("error"))["error"]
        assert error["code"] == "conversation_already_has_active_response"
        gate.set()


@pytest.mark.parametrize(
    ("mode", "param"),
    [
        ({"type": "frames", "frame_ms": 100}, "frame_ms"),
        ({"type": "frames", "frame_ms": 40}, "frame_ms"),
        ({"type": "frames", "frame_ms": 4000}, "frame_ms"),
        ({"type": "frames", "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_settings_outside_their_range_are_refused(mode, param):
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection(mode)
        assert (await client.expect("error"))["error"]["param"].endswith(param)


async def test_settings_are_kept_and_changed_one_by_one():
    async with connected(FakeOrchestrator()) as client:
        assert await in_frames(client, {"type": "frames"}) == {
            "type": "frames",
            "frame_ms": 480,
            "max_tokens": 4,
        }
        assert (await in_frames(client, {"frame_ms": 80}))["frame_ms"] == 80
        assert (await in_frames(client, {"max_tokens": 7}))["frame_ms"] == 80
        assert (await in_frames(client, {"frame_ms": None}))["frame_ms"] == 480
        assert (await in_frames(client, {"type": "server_vad"}))["type"] == "server_vad"


async def test_frames_that_wait_at_the_end_of_the_mode_are_reported_as_dropped():
    gate = asyncio.Event()
    async with connected(FakeOrchestrator(scripts=[[gate]])) as client:
        await in_frames(client)
        client.append(tone(3 * 160))
        await asyncio.sleep(0.05)
        client.turn_detection(None)
        events = [await client.next() for _ in range(4)]
    dropped = [e["frame_index"] for e in events if e["type"] == "frame.done"]
    assert sorted(dropped) == [0, 1, 2]
    assert {e["outcome"] for e in events if e["type"] == "frame.done"} == {"dropped"}


async def test_frames_are_in_the_budget_of_all_conversations_until_the_mode_ends():
    orchestrator = FakeOrchestrator(scripts=[wrote(f"{n}") for n in range(40)])
    shared = services(orchestrator)
    async with connected(orchestrator, shared) as client:
        await in_frames(client)
        used = []
        for _ in range(40):
            client.append(FRAME)
            await client.expect("frame.done")
            used.append(shared.item_budget.used_bytes)
        assert used[4] == 5 * 160 * 32 + 5
        # Two seconds are not packed.
        assert max(used) < 2.2 * 32_000 + 0.4 * 40 * 160 * 32
        client.turn_detection({"type": "server_vad"})
        await client.until("session.updated")
        assert shared.item_budget.used_bytes == 0


@pytest.mark.parametrize("limit", ["max_conversation_bytes", "max_conversation_bytes_of_all"])
async def test_a_full_conversation_loses_its_oldest_frames(limit):
    orchestrator = FakeOrchestrator(scripts=[wrote(f"{n}") for n in range(130)])
    shared = services(orchestrator, **{limit: 100_000})
    async with connected(orchestrator, shared) as client:
        client.say("I am Ada.")
        for _ in range(2):
            await client.next()
        await in_frames(client)
        for _ in range(130):  # of which every 63rd counts as a response
            client.append(FRAME)
            await client.expect("frame.done")
    lengths = [len(turn.history) for turn in orchestrator.turns]
    assert lengths[62] == 2 + 2 * 62
    assert lengths[126] < 2 + 2 * 100
    assert {turn.history[0].parts for turn in orchestrator.turns} == {
        orchestrator.turns[0].history[0].parts
    }
    assert shared.metrics.items_dropped.labels("full")._value.get() > 0
    assert shared.item_budget.used_bytes == 0
