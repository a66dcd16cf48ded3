"""Sessions in frame mode, on the real stages."""

import asyncio

import numpy as np
import pytest

from test.e2e.conftest import wait_until
from test.e2e.socket_client import clip_24k, connected, is_whole

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
    """Sends a frame after each result, so that no clock is needed. One may be under way."""

    def __init__(self, socket, frame_ms: int):
        self._socket, self._samples = socket, frame_ms * 24
        self._sound, self._at = clip_24k("sp_jfk.flac", 8.0), 0

    async def begin(self, max_tokens: int = 3, **session) -> None:
        detection = {"type": "frames", "frame_ms": self._samples // 24, "max_tokens": max_tokens}
        audio = {"input": {"turn_detection": detection}}
        updated = await self._socket.session(audio=audio, **session)
        assert updated["session"]["audio"]["input"]["turn_detection"] == detection
        # The first frame's length depends on its place in the period; the resampler has a delay.
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
async def test_every_frame_gets_a_few_tokens(server, frame_ms):
    async with connected(server.ws) as socket:
        turns = FrameTurns(socket, frame_ms)
        await turns.begin(temperature=0)
        frames = [await turns.next() for _ in range(6)]
        assert all(frame["outcome"] in HEARD for frame in frames), frames
        assert all(frame["output_tokens"] == 3 and frame["text"].strip() for frame in frames)
        assert [f["audio_end_ms"] - f["audio_start_ms"] for f in frames] == [frame_ms] * 6
        # Turns work again after frame mode.
        await socket.session(audio={"input": {"turn_detection": None}})
        again = await socket.ask("and now", max_output_tokens=8)
        assert is_whole(again), again


async def test_a_session_in_frame_mode_keeps_its_window(server):
    async with connected(server.ws) as socket:
        turns = FrameTurns(socket, 480)
        await turns.begin(truncation=SMALL)
        frames = [await turns.next() for _ in range(40)]
        assert all(frame["outcome"] in HEARD for frame in frames)
        wait_until(
            lambda: server.stage_load("thinker", "policy_tokens_compacted") > LIMIT,
            5,
            "compactions",
        )
        assert server.stage_load("thinker", "kv_tokens_used") < LIMIT + 100


async def test_frames_are_empty_while_the_thinker_restarts(server):
    async with connected(server.ws) as socket:
        turns = FrameTurns(socket, 480)
        await turns.begin()
        assert (await turns.next())["outcome"] in HEARD
        server.stage_process("thinker").kill()
        lost = await turns.next()
        while lost["outcome"] in HEARD:  # its result came before the signal
            lost = await turns.next()
        assert lost["outcome"] == "empty"
        assert lost["error"]["code"] == "stage_unavailable"
        await asyncio.to_thread(wait_until, server.is_healthy, RESTART_S, "thinker restarted")
        outcomes = [(await turns.next())["outcome"] for _ in range(4)]
        assert outcomes[-1] in HEARD, outcomes
