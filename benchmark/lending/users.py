"""Users of workload W3 who speak some turns and type others."""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx

from benchmark.kv.workload import Access
from sglang_live.messages import NextUseHint, UserSpeaking
from sglang_live.stages.engine_link import FeedSocket
from sglang_live.stages.supervisor import Replica

# The gateway repeats that a user speaks.
_REPEAT_S = 2.0


@dataclass(slots=True)
class TurnTimes:
    """One turn.

    Attributes:
        number: of the turn in its conversation, from 0.
        typed: nothing announced its request.
        held: history tokens of the session; computed: those that were computed again.
        gap_ms: longest time between two messages of the response; 0 if there is one.
    """

    number: int
    typed: bool
    ttft_ms: float
    held: int
    computed: int
    gap_ms: float
    error: str


class Users:
    """
    Args:
        announces: whether the thinker is told when a user speaks.
    """

    def __init__(self, thinker: Replica, client: httpx.AsyncClient, announces: bool):
        self._client, self._announces = client, announces
        self._feed = FeedSocket(thinker.spec.socket_path("inbox"))

    async def converse(
        self, accesses: list[Access], began_s: float, typed_share: float
    ) -> list[TurnTimes]:
        """Run one session's turns in order; its schedule counts from began_s."""
        name, turns = f"session-{accesses[0].session}", []
        rng = random.Random(accesses[0].session)
        body = {"capacity_of_str_len": 1 << 40, "session_id": name, "streaming": True}
        (await self._client.post("/open_session", json=body)).raise_for_status()
        await asyncio.sleep(max(0.0, began_s + accesses[0].speech_s - time.monotonic()))
        for access in accesses:
            typed = rng.random() < typed_share
            await self._input(name, access.request_s - access.speech_s, typed)
            turns.append(await self._turn(name, access, rng, typed))
            self._feed.send(NextUseHint(name, access.playback_s, None, None))
            await asyncio.sleep(access.playback_s)
            self._feed.send(NextUseHint(name, 0.0, None, None))
            await asyncio.sleep(access.next_gap_s)
        await self._client.post("/close_session", json={"session_id": name})
        return turns

    async def _input(self, name: str, duration_s: float, typed: bool) -> None:
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._announces and not typed:
                self._feed.send(UserSpeaking(name))
            await asyncio.sleep(min(left_s, _REPEAT_S))

    async def _turn(self, name: str, access: Access, rng: random.Random, typed: bool) -> TurnTimes:
        request = {
            "input_ids": [rng.randrange(10, 200) for _ in range(access.input_tokens)],
            "session_params": {"id": name},
            "sampling_params": {
                "max_new_tokens": access.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
            "stream": True,
        }
        asked_s, meta, error = time.monotonic(), {}, ""
        came_s: list[float] = []
        async with self._client.stream("POST", "/generate", json=request) as answer:
            async for text in answer.aiter_lines():
                if not text.startswith("data: ") or text == "data: [DONE]":
                    continue
                came_s.append(time.monotonic())
                event = json.loads(text[6:])
                if "error" in event:
                    error = str(event["error"])
                    break
                meta = event["meta_info"]
        came_s = came_s or [time.monotonic()]
        # The newest token is computed with the next request in any case.
        computed = max(0, access.history_tokens - meta.get("cached_tokens", 0) - 1)
        return TurnTimes(
            number=access.turn,
            typed=typed,
            ttft_ms=1000 * (came_s[0] - asked_s),
            held=access.history_tokens,
            computed=computed if meta else 0,
            gap_ms=1000 * max((b - a for a, b in pairwise(came_s)), default=0.0),
            error=error,
        )
