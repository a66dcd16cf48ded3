"""Sessions with a sink and a window have the tokens of a reference with bounded attention.

The reference computes a whole conversation in one pass, each token with its attention range.
Dropped KV is overwritten with NaN, so that a read of it is detected.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL.Image import Image

from lab.attachment import joined
from lab.compactions import told_in
from lab.poison import POISON
from sglang_live.core import AudioPart, HistoryItem, ImagePart, TextPart
from sglang_live.kv.retention import RetentionConfig
from test.engine.bounded_sessions import SINK, SLACK, WINDOW, Engine, run_session
from test.engine.conftest import IS_NIGHTLY, running_stages
from test.engine.reference import AUDIO, IMAGE, Reference
from test.engine.turns import greedy_turn, reply_of, think, user
from test.pictures import noise, part_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate", "retention")
SYSTEM = "You are a kind assistant."
LONGEST_TURN = 100


@dataclass(frozen=True)
class Variant:
    page: int = 1
    overlap: bool = True
    chunk: int = 512
    retracts: bool = False


VARIANTS = {
    "page-1": Variant(),
    "page-16-chunks": Variant(page=16, chunk=32),
    "page-16-no-overlap-retractions": Variant(page=16, overlap=False, retracts=True),
}
# Every other round one of several requests is retracted, so turns often lose their row.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "2"}


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
    drops = cache / "drops"
    environment = joined(POISON, told_in(drops), RETRACT if variant.retracts else {})
    stages = running_stages(
        endless_checkpoint,
        cache,
        args,
        policies=POLICIES,
        thinker_environment=environment,
        names=("thinker",),
    )
    async with stages as running:
        yield Engine(running, variant.page, variant.retracts, drops)


async def test_a_long_session_matches_a_windowed_reference(bounded, reference):
    # In one variant, long enough to drop the window many times.
    many = (320, 100) if IS_NIGHTLY else (160, 50)
    n_turns, n_windows = many if bounded.page == 1 else (60, 20)
    session = await run_session(bounded, "long", seed=1, n_turns=n_turns)
    assert session.n_dropped > n_windows * WINDOW
    session.check(reference)
    assert await bounded.load("kv_tokens_used") <= SINK + WINDOW + 60 + 30 + 2 * bounded.page
    await session.close()


async def test_sessions_of_all_ages_share_batches_with_plain_requests(bounded, reference):
    async def plain(seed: int) -> None:
        ids = [random.Random(seed).randrange(10, 200) for _ in range(40)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 30, "temperature": 0}}
        await bounded.post("/generate", body)

    # Some begin with more than their sink, which is then in the radix tree.
    sessions = [
        run_session(bounded, f"mixed-{n}", seed=n, n_turns=4 + 6 * n, n_first=SINK + 33 * (n % 2))
        for n in range(4)
    ]
    done = await asyncio.gather(*sessions, *(plain(seed) for seed in range(8)))
    for session in done[:4]:
        session.check(reference)
        await session.close()
    assert await bounded.load("kv_tokens_used") == 0
    # More retractions than requests: some lost their row twice.
    n_requests = sum(4 + 6 * n for n in range(4)) + 8
    assert (await bounded.load("policy_retracted") > n_requests) == bounded.retracts


class SpokenSession:
    """A session through the stage: clips, pictures and text in, responses of some tokens out.

    A response may be long enough for a compaction while it is generated. Before which token that
    is depends on when the stage's order comes; the engine tells.
    """

    def __init__(self, engine: Engine, reference: Reference, name: str):
        self.engine, self.reference, self.name = engine, reference, name
        self.links = engine.stages.links(name)
        self.history: list[HistoryItem] = []
        self.ids: list[int] = []
        self.features: dict[str, list[dict]] = {"clips": [], "pictures": []}
        self.responses: list[tuple[int, list[int]]] = []  # position and ids of each
        self.gone: list[str] = []
        self.n_dropped = 0

    async def turn(
        self,
        item: HistoryItem,
        clips: list[np.ndarray],
        n_response: int,
        pictures: Sequence[Image] = (),
    ) -> None:
        if not self.ids:
            self._add(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>", [])
            self.sink = -(-len(self.ids) // self.engine.page) * self.engine.page
        marks = {AudioPart: lambda _: AUDIO, ImagePart: lambda _: IMAGE, TextPart: lambda p: p.text}
        content = "".join(marks[type(part)](part) for part in item.parts)
        turn = replace(
            greedy_turn(*self.history, item, system=SYSTEM, n_tokens=n_response),
            retention=RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK),
        )
        done = await think(self.links, turn)
        assert not done.rebuilt
        assert done.n_prompt <= self.sink + WINDOW + LONGEST_TURN + 2 * self.engine.page
        self._add(f"user\n{content}<|im_end|>\n<|im_start|>assistant\n", clips, pictures)
        self.n_dropped = len(self.ids) - done.n_prompt  # before this turn
        self.responses.append((len(self.ids), done.ids))
        self.ids += done.ids
        self.history += [item, reply_of(turn, done)]
        self.history = [item for item in self.history if item.key not in done.gone]
        self.gone += done.gone
        self._add("<|im_end|>\n<|im_start|>", [])

    def _add(self, text: str, clips: list[np.ndarray], pictures: Sequence[Image] = ()) -> None:
        inputs = self.reference.inputs(text, clips, pictures)
        self.ids += inputs["input_ids"][0].tolist()
        if clips:
            self.features["clips"].append(inputs)
        if pictures:
            self.features["pictures"].append(inputs)

    def check(self) -> None:
        """Checks that each token of the responses is the likeliest, of equally likely ones any."""
        told = map(json.loads, self.engine.drops.read_text().splitlines())
        drops = [drop for drop in told if drop["session"].startswith(f"{self.name}-")]
        seen_from, n_dropped = [0] * len(self.ids), 0
        for drop in drops:
            assert drop["begin"] == self.sink
            n_dropped += drop["n_tokens"]
            n_behind = len(self.ids) - drop["before"]
            seen_from[drop["before"] :] = [self.sink + n_dropped] * n_behind
        assert n_dropped >= self.n_dropped
        inputs = {"input_ids": torch.tensor([self.ids]), **self.features}
        logprobs = self.reference.logprobs(inputs, self.sink, seen_from)
        within = [drop["before"] for drop in drops]
        n_within = 0
        for begin, ids in self.responses:
            n_within += any(begin <= before < begin + len(ids) - 1 for before in within)
            rows = logprobs[begin - 1 : begin - 1 + len(ids)]
            said = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            torch.testing.assert_close(said, rows.max(-1).values, atol=1e-4, rtol=0)
        assert n_within or all(len(ids) < 3 for _, ids in self.responses)


async def test_a_spoken_session_drops_whole_clips(bounded, reference, speech):
    rng = random.Random(5)
    session = SpokenSession(bounded, reference, "spoken")
    items = []
    for n in range(24):
        start, n_samples = rng.randrange(100_000), rng.randrange(8_000, 40_000)
        clip = speech[start : start + n_samples]
        items.append(user(clip) if n % 3 else user("why", clip) if n % 2 else user("go on"))
        clips = [p.pcm for p in items[-1].parts if isinstance(p, AudioPart)]
        await session.turn(items[-1], clips, n_response=8)
    assert session.n_dropped > 3 * WINDOW
    assert items[0].key in session.gone and items[-1].key not in session.gone
    session.check()
    session.links.close()


async def test_a_session_drops_whole_pictures(bounded, reference, speech):
    """Pictures take fewer positions than tokens, which the tokens behind them count on."""
    rng = random.Random(6)
    session = SpokenSession(bounded, reference, "seen")
    items = []
    # In one variant, long enough to drop the window many times.
    n_turns, n_windows = (130, 50) if bounded.page == 1 else (24, 3)
    for n in range(n_turns):
        sides = 32 * rng.randrange(2, 7), 32 * rng.randrange(2, 6)
        image = noise(*sides, seed=n)
        start = rng.randrange(100_000)
        clip = speech[start : start + rng.randrange(8_000, 20_000)]
        parts = [("look", part_of(image)), (clip, part_of(image), "why"), ("go on",)][n % 3]
        items.append(user(*parts))
        clips = [p.pcm for p in items[-1].parts if isinstance(p, AudioPart)]
        pictures = [image] if n % 3 < 2 else []
        await session.turn(items[-1], clips, n_response=8, pictures=pictures)
    assert session.n_dropped > n_windows * WINDOW
    assert items[0].key in session.gone and items[-1].key not in session.gone
    session.check()
    session.links.close()
