"""A thinker whose pool is too small for its sessions, over SGLang's own API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import torch

from benchmark.native_client import native_client
from sglang_live.stages.engine_link import FeedSocket
from test.engine.conftest import Stages
from test.engine.reference import Reference


class Pool:
    """A thinker with a small pool, over SGLang's own API."""

    def __init__(self, stages: Stages):
        self.stages = stages
        spec = stages.replica("thinker").spec
        self.spec = spec
        self.feed = FeedSocket(spec.socket_path("inbox"))

    async def post(self, path: str, body: dict, timeout_s: float = 60.0) -> httpx.Response:
        async with native_client(self.spec, timeout_s) as client:
            response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    async def open(self, name: str) -> None:
        body = {"capacity_of_str_len": 1 << 40, "session_id": name, "streaming": True}
        await self.post("/open_session", body)

    async def close(self, name: str) -> None:
        await self.post("/close_session", {"session_id": name})

    async def say(self, name: str, ids: list[int], n: int, timeout_s: float = 60.0) -> list[tuple]:
        """Run a turn. Returns the response's tokens with their log-probabilities."""
        body = {
            "input_ids": ids,
            "session_params": {"id": name},
            "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
        }
        response = (await self.post("/generate", body, timeout_s)).json()
        return [(t, logprob) for logprob, t, _ in response["meta_info"]["output_token_logprobs"]]

    @contextlib.asynccontextmanager
    async def saying(self, name: str, ids: list[int], n: int) -> AsyncIterator[None]:
        """Run a turn around the block: from its first token to its end."""
        body = {
            "input_ids": ids,
            "session_params": {"id": name},
            "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True},
            "stream": True,
        }
        async with (
            native_client(self.spec, 180) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            assert response.status_code == 200
            events = response.aiter_lines()
            assert "error" not in await anext(events)
            yield
            async for _ in events:
                pass

    async def load(self, name: str) -> float:
        await asyncio.sleep(0.7)
        ready = await self.stages.replica("thinker").client.ping(5.0)
        return ready.load[name]


def check(reference: Reference, ids: list[int], said: list[tuple[int, float]]) -> None:
    """Check that every response token is the most likely, with the engine's log-probability."""
    if not said:
        return
    logprobs = reference.logprobs({"input_ids": torch.tensor([ids])}, 0, [0] * len(ids))
    at = torch.tensor([position for position, _ in said])
    told = torch.tensor([logprob for _, logprob in said])
    got = torch.tensor(ids)[at]
    torch.testing.assert_close(logprobs[at - 1, got], told, atol=1e-5, rtol=0)
    assert (logprobs[at - 1].argmax(-1) == got).all()
