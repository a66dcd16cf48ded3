"""Sessions over SGLang's own API that keep a sink and a window."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from benchmark.native_client import native_client
from sglang_live.kv.retention import compaction_of
from sglang_live.messages import RetainSession
from sglang_live.stages.engine_link import FeedSocket
from test.engine.conftest import Stages
from test.engine.reference import Reference

SINK, WINDOW, SLACK = 12, 64, 1


class Engine:
    """The thinker's engine over SGLang's own API, and the control channel into it."""

    def __init__(
        self, stages: Stages, page: int, retracts: bool = False, drops: Path | None = None
    ):
        """drops: where each is told (lab/compactions.py). None: they are not."""
        self.drops, self.retracts = drops, retracts
        spec = stages.replica("thinker").spec
        self.stages, self.page = stages, page
        self.spec = spec
        self.feed = FeedSocket(spec.socket_path("inbox"))

    async def post(self, path: str, body: dict) -> httpx.Response:
        async with native_client(self.spec, 120) as client:
            response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response

    async def load(self, name: str) -> float:
        await asyncio.sleep(0.7)
        ready = await self.stages.replica("thinker").client.ping(5.0)
        return ready.load[name]


@dataclass
class BoundedSession:
    """A session of text, and the attention range of each of its tokens.

    ids, seen_from: of all tokens since the beginning.
    said: (position, logprob) of the tokens of responses.
    """

    engine: Engine
    name: str
    ids: list[int] = field(default_factory=list)
    seen_from: list[int] = field(default_factory=list)
    said: list[tuple[int, float]] = field(default_factory=list)
    n_dropped: int = 0
    sink: int = SINK
    owned: int = 0  # tokens of the radix tree: whole pages of the first prompt

    async def open(self) -> None:
        body = {"capacity_of_str_len": 1 << 40, "session_id": self.name, "streaming": True}
        await self.engine.post("/open_session", body)
        order = RetainSession(self.name, SINK, WINDOW, SLACK, every_request=True)
        self.engine.feed.send(order)

    async def close(self) -> None:
        await self.engine.post("/close_session", {"session_id": self.name})

    async def turn(self, new_ids: list[int], n_response: int) -> None:
        body = {
            "input_ids": new_ids,
            "session_params": {"id": self.name},
            "sampling_params": {
                "max_new_tokens": n_response, "temperature": 0, "ignore_eos": True
            },
            "return_logprob": True,
        }  # fmt: skip
        meta = (await self.engine.post("/generate", body)).json()["meta_info"]
        if not self.ids:
            self.owned = len(new_ids) // self.engine.page * self.engine.page
        self._take([*new_ids])
        response = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
        n_prompt = len(self.ids)
        for n, (logprob, token_id, _) in enumerate(meta["output_token_logprobs"]):
            self.said.append((n_prompt + n, logprob))
            if n == len(response) - 1:
                self.ids.append(token_id)  # computed with the next request
                continue
            if len(self.ids) - self.n_dropped > SINK + WINDOW + SLACK + 2 * self.engine.page:
                self._compact(len(self.ids), n_response=n)
            self._take([token_id])
        self._compact(len(self.seen_from), n_response=0)

    def _take(self, ids: list[int]) -> None:
        self.ids += ids
        seen_from = self.sink + self.n_dropped if self.n_dropped else 0
        self.seen_from += [seen_from] * (len(self.ids) - len(self.seen_from))

    def _compact(self, n_kv: int, n_response: int) -> None:
        cut = compaction_of(
            n_tokens=n_kv - self.n_dropped,
            sink_tokens=SINK,
            window_tokens=max(WINDOW, n_response),
            page_size=self.engine.page,
            owned_from=self.owned,
            media=(),
            slack_tokens=SLACK,
        )
        if cut is not None:
            self.sink, self.n_dropped = cut.begin, self.n_dropped + cut.n_tokens
            self.owned = min(self.owned, self.sink)

    def check(self, reference: Reference) -> None:
        """Check that every response token is the most likely, with the engine's log-probability."""
        rows = self.seen_from + [self.seen_from[-1]] * (len(self.ids) - len(self.seen_from))
        inputs = {"input_ids": torch.tensor([self.ids])}
        logprobs = reference.logprobs(inputs, self.sink, rows)
        at = torch.tensor([position for position, _ in self.said])
        told = torch.tensor([logprob for _, logprob in self.said])
        ids = torch.tensor(self.ids)[at]
        torch.testing.assert_close(logprobs[at - 1, ids], told, atol=1e-5, rtol=0)
        assert (logprobs[at - 1].argmax(-1) == ids).all()


async def run_session(
    engine: Engine, name: str, seed: int, n_turns: int, n_first: int = SINK
) -> BoundedSession:
    rng = random.Random(seed)
    session = BoundedSession(engine, name)
    await session.open()
    for n in range(n_turns):
        n_new = rng.randrange(1, 60) if n else n_first
        await session.turn([rng.randrange(10, 200) for _ in range(n_new)], rng.randrange(1, 30))
    return session
