"""Sessions that keep a sink and a window say what a model says that sees no more than these.

The reference computes a whole conversation in one pass, each token with the sight it had.
What a session has dropped is overwritten with NaN, so that nobody reads it unnoticed.
"""

import asyncio
import random
from dataclasses import dataclass, field, replace

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch

from sglang_live.bridge.feed_types import RetainSession
from sglang_live.kv.retention import RetentionConfig, cut_of
from sglang_live.orchestrator.history import AudioPart, HistoryItem
from sglang_live.stages.engine_host import FeedSocket
from test.engine.conftest import Stages, running_stages
from test.engine.reference import AUDIO, Reference
from test.engine.turns import greedy_turn, reply_of, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate", "retention")
SINK, WINDOW, SLACK = 12, 64, 1
SYSTEM = "You are a kind assistant."
LONGEST_TURN = 100


@dataclass(frozen=True)
class Variant:
    page: int = 1
    overlap: bool = True
    chunk: int = 512


VARIANTS = {
    "page-1": Variant(),
    "page-16-no-overlap": Variant(page=16, overlap=False),
    "page-16-chunks": Variant(page=16, chunk=32),
}


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=VARIANTS.values(), ids=VARIANTS.keys()
)
async def bounded(request, endless_checkpoint, tmp_path_factory):
    variant = request.param
    args = {
        "page_size": variant.page,
        "disable_overlap_schedule": not variant.overlap,
        "chunked_prefill_size": variant.chunk,
    }
    cache = tmp_path_factory.mktemp("retention")
    poison = {"SGLANG_LIVE_POISON_FREED_KV": "1"}
    stages = running_stages(
        endless_checkpoint, cache, args, policies=POLICIES, thinker_environment=poison
    )
    async with stages as running:
        yield Engine(running, variant)


class Engine:
    """The thinker's engine over SGLang's own API, and the control channel into it."""

    def __init__(self, stages: Stages, variant: Variant):
        spec = stages.replica("thinker").spec
        self.stages, self.variant = stages, variant
        self.url = f"http://127.0.0.1:{spec.native_port}"
        self.feed = FeedSocket(spec.socket_path("inbox"))

    async def post(self, path: str, body: dict) -> httpx.Response:
        async with httpx.AsyncClient(timeout=120) as client:
            answer = await client.post(f"{self.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def load(self, name: str) -> float:
        await asyncio.sleep(0.7)
        ready = await self.stages.replica("thinker").client.ping(5.0)
        return ready.load[name]


@dataclass
class Call:
    """A session of text, and what each of its tokens could see when it was computed.

    ids, seen_from: of all tokens since the beginning. said: (position, logprob) of replies.
    """

    engine: Engine
    name: str
    ids: list[int] = field(default_factory=list)
    seen_from: list[int] = field(default_factory=list)
    said: list[tuple[int, float]] = field(default_factory=list)
    n_cut: int = 0
    sink: int = SINK
    owned: int = 0  # by the radix tree: whole pages of the first prompt

    async def open(self) -> None:
        body = {"capacity_of_str_len": 1 << 40, "session_id": self.name, "streaming": True}
        await self.engine.post("/open_session", body)
        order = RetainSession(self.name, SINK, WINDOW, SLACK, unasked=True)
        self.engine.feed.send(order)

    async def close(self) -> None:
        await self.engine.post("/close_session", {"session_id": self.name})

    async def turn(self, new_ids: list[int], n_reply: int) -> None:
        body = {
            "input_ids": new_ids,
            "session_params": {"id": self.name},
            "sampling_params": {
                "max_new_tokens": n_reply, "temperature": 0, "ignore_eos": True
            },
            "return_logprob": True,
        }  # fmt: skip
        meta = (await self.engine.post("/generate", body)).json()["meta_info"]
        if not self.ids:
            self.owned = len(new_ids) // self.engine.variant.page * self.engine.variant.page
        self._take([*new_ids])
        reply = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
        n_prompt = len(self.ids)
        for n, (logprob, token_id, _) in enumerate(meta["output_token_logprobs"]):
            self.said.append((n_prompt + n, logprob))
            if n == len(reply) - 1:
                self.ids.append(token_id)  # computed with the next request
                continue
            if len(self.ids) - self.n_cut > SINK + WINDOW + SLACK + 2 * self.engine.variant.page:
                self._cut(len(self.ids), n_reply=n)
            self._take([token_id])
        self._cut(len(self.seen_from), n_reply=0)

    def _take(self, ids: list[int]) -> None:
        self.ids += ids
        seen_from = self.sink + self.n_cut if self.n_cut else 0
        self.seen_from += [seen_from] * (len(self.ids) - len(self.seen_from))

    def _cut(self, n_kv: int, n_reply: int) -> None:
        cut = cut_of(
            n_tokens=n_kv - self.n_cut,
            sink_tokens=SINK,
            window_tokens=max(WINDOW, n_reply),
            page_size=self.engine.variant.page,
            owned_from=self.owned,
            media=(),
            slack_tokens=SLACK,
        )
        if cut is not None:
            self.sink, self.n_cut = cut.begin, self.n_cut + cut.n_tokens
            self.owned = min(self.owned, self.sink)

    def check(self, reference: Reference) -> None:
        """Every reply token is the likeliest, and as likely as the engine said."""
        rows = self.seen_from + [self.seen_from[-1]] * (len(self.ids) - len(self.seen_from))
        inputs = {"input_ids": torch.tensor([self.ids])}
        logprobs = reference.logprobs(inputs, self.sink, rows)
        at = torch.tensor([position for position, _ in self.said])
        told = torch.tensor([logprob for _, logprob in self.said])
        ids = torch.tensor(self.ids)[at]
        torch.testing.assert_close(logprobs[at - 1, ids], told, atol=1e-5, rtol=0)
        assert (logprobs[at - 1].argmax(-1) == ids).all()


async def a_call(engine: Engine, name: str, seed: int, n_turns: int, n_first: int = SINK) -> Call:
    rng = random.Random(seed)
    call = Call(engine, name)
    await call.open()
    for n in range(n_turns):
        n_new = rng.randrange(1, 60) if n else n_first
        await call.turn([rng.randrange(10, 200) for _ in range(n_new)], rng.randrange(1, 30))
    return call


async def test_a_long_call_is_heard_as_through_a_window(bounded, reference):
    call = await a_call(bounded, "long", seed=1, n_turns=60)
    assert call.n_cut > 20 * WINDOW
    call.check(reference)
    assert (
        await bounded.load("kv_tokens_used") <= SINK + WINDOW + 60 + 30 + 2 * bounded.variant.page
    )
    await call.close()


async def test_sessions_of_all_ages_share_batches_with_plain_requests(bounded, reference):
    async def plain(seed: int) -> None:
        ids = [random.Random(seed).randrange(10, 200) for _ in range(40)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 30, "temperature": 0}}
        await bounded.post("/generate", body)

    # Some begin with more than their sink, which the radix tree then holds.
    calls = [
        a_call(bounded, f"mixed-{n}", seed=n, n_turns=4 + 6 * n, n_first=SINK + 33 * (n % 2))
        for n in range(4)
    ]
    done = await asyncio.gather(*calls, *(plain(seed) for seed in range(8)))
    for call in done[:4]:
        call.check(reference)
        await call.close()
    assert await bounded.load("kv_tokens_used") == 0


class SpokenCall:
    """A call through the stage: clips and text in, replies of some tokens out."""

    def __init__(self, engine: Engine, reference: Reference, name: str):
        self.engine, self.reference = engine, reference
        self.links = engine.stages.links(name)
        self.history: list[HistoryItem] = []
        self.ids: list[int] = []
        self.seen_from: list[int] = []
        self.features: list[dict] = []
        self.replies: list[tuple[int, list[int]]] = []  # where they begin, and their ids
        self.gone: list[str] = []
        self.n_cut = 0

    async def turn(self, item: HistoryItem, clips: list[np.ndarray], n_reply: int) -> None:
        if not self.ids:
            self._take_in(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>", [])
            self.sink = -(-len(self.ids) // self.engine.variant.page) * self.engine.variant.page
        content = "".join(AUDIO if isinstance(p, AudioPart) else p.text for p in item.parts)
        if not self.history:
            self.base = await self.engine.load("policy_tokens_cut")
        turn = replace(
            greedy_turn(*self.history, item, system=SYSTEM, n_tokens=n_reply),
            retention=RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK),
        )
        done = await think(self.links, turn)
        assert not done.rebuilt
        assert done.n_prompt <= self.sink + WINDOW + LONGEST_TURN + 2 * self.engine.variant.page
        self._take_in(f"user\n{content}<|im_end|>\n<|im_start|>assistant\n", clips)
        self.replies.append((len(self.ids), done.ids))
        self.ids += done.ids
        self._see(len(self.ids) - 1)
        self.history += [item, reply_of(turn, done)]
        self.n_cut = round(await self.engine.load("policy_tokens_cut") - self.base)
        self.history = [item for item in self.history if item.key not in done.gone]
        self.gone += done.gone
        self._take_in("<|im_end|>\n<|im_start|>", [], seen=False)

    def _take_in(self, text: str, clips: list[np.ndarray], seen: bool = True) -> None:
        inputs = self.reference.inputs(text, clips)
        self.ids += inputs["input_ids"][0].tolist()
        if clips:
            self.features.append(inputs)
        if seen:
            self._see(len(self.ids))

    def _see(self, n_tokens: int) -> None:
        seen_from = self.sink + self.n_cut if self.n_cut else 0
        self.seen_from += [seen_from] * (n_tokens - len(self.seen_from))

    def check(self) -> None:
        rows = self.seen_from + [self.seen_from[-1]] * (len(self.ids) - len(self.seen_from))
        inputs = {"input_ids": torch.tensor([self.ids]), "clips": self.features}
        best = self.reference.logprobs(inputs, self.sink, rows).argmax(-1)
        for begin, ids in self.replies:
            assert best[begin - 1 : begin - 1 + len(ids)].tolist() == ids


async def test_a_spoken_call_forgets_whole_clips(bounded, reference, speech):
    rng = random.Random(5)
    call = SpokenCall(bounded, reference, "spoken")
    items = []
    for n in range(24):
        start, n_samples = rng.randrange(100_000), rng.randrange(8_000, 40_000)
        clip = speech[start : start + n_samples]
        items.append(user(clip) if n % 3 else user("why", clip) if n % 2 else user("go on"))
        clips = [p.pcm for p in items[-1].parts if isinstance(p, AudioPart)]
        # So short that no cut falls into a reply, which would be at a token nobody can foretell.
        await call.turn(items[-1], clips, n_reply=2)
    assert call.n_cut > 3 * WINDOW
    assert items[0].key in call.gone and items[-1].key not in call.gone
    call.check()
    call.links.close()
