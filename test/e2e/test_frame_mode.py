"""Calls that are heard frame by frame, on the real stages."""

import asyncio

import numpy as np
import pytest

from test.e2e.conftest import wait_until
from test.e2e.socket_client import clip_24k, connected

pytestmark = [pytest.mark.e2e]

RESTART_S = 90
HEARD = ("on_time", "late")
LIMIT = 200
SMALL = {
    "type": "retention_ratio",
    "retention_ratio": 0.7,
    "token_limits": {"post_instructions": LIMIT},
}


class FrameTurns:
    """Says the next frame when one was answered, so no clock is in it. One may be on its way."""

    def __init__(self, socket, frame_ms: int):
        self._socket, self._samples = socket, frame_ms * 24
        self._sound, self._at = clip_24k("sp_jfk.flac", 8.0), 0

    async def begin(self, max_tokens: int = 3, **session) -> None:
        detection = {"type": "frames", "frame_ms": self._samples // 24, "max_tokens": max_tokens}
        audio = {"input": {"turn_detection": detection}}
        updated = await self._socket.session(audio=audio, **session)
        assert updated["session"]["audio"]["input"]["turn_detection"] == detection
        # The first frame is as long as its place in the beat wants, the resampler is behind a bit.
        await self._say(self._samples + 120 * 24)
        await self._socket.until("frame.done")

    async def next(self) -> dict:
        await self._say(self._samples)
        return await self._socket.until("frame.done")

    async def _say(self, n: int) -> None:
        pcm = np.take(self._sound, range(self._at, self._at + n), mode="wrap")
        self._at += n
        await self._socket.append(pcm)


@pytest.mark.parametrize("frame_ms", [80, 480, 2000])
async def test_every_frame_is_answered_with_a_few_tokens(server, frame_ms):
    async with connected(server.ws) as socket:
        call = FrameTurns(socket, frame_ms)
        await call.begin(temperature=0)
        frames = [await call.next() for _ in range(6)]
        assert all(frame["outcome"] in HEARD for frame in frames), frames
        assert all(frame["output_tokens"] == 3 and frame["text"].strip() for frame in frames)
        assert [f["audio_end_ms"] - f["audio_start_ms"] for f in frames] == [frame_ms] * 6
        # Turns are there again when they are asked for.
        await socket.session(audio={"input": {"turn_detection": None}})
        again = await socket.ask("and now", max_output_tokens=8)
        assert again["response"]["status"] in ("completed", "incomplete")


async def test_a_call_in_frames_keeps_to_its_window(server):
    async with connected(server.ws) as socket:
        call = FrameTurns(socket, 480)
        await call.begin(truncation=SMALL)
        frames = [await call.next() for _ in range(40)]
        assert all(frame["outcome"] in HEARD for frame in frames)
        wait_until(
            lambda: server.stage_load("thinker", "policy_tokens_compacted") > LIMIT, 5, "cuts"
        )
        assert server.stage_load("thinker", "kv_tokens_used") < LIMIT + 100


async def test_frames_are_empty_while_the_thinker_is_away(server):
    async with connected(server.ws) as socket:
        call = FrameTurns(socket, 480)
        await call.begin()
        assert (await call.next())["outcome"] in HEARD
        server.stage_process("thinker").kill()
        lost = await call.next()
        while lost["outcome"] in HEARD:  # it was answered before the signal arrived
            lost = await call.next()
        assert lost["outcome"] == "empty"
        assert lost["error"]["code"] == "stage_unavailable"
        await asyncio.to_thread(wait_until, server.is_healthy, RESTART_S, "thinker restarted")
        outcomes = [(await call.next())["outcome"] for _ in range(4)]
        assert outcomes[-1] in HEARD, outcomes
