"""A call with Moshi: its frames are those of the reference, whenever the user's frames come."""

import asyncio
import contextlib
import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from lab.cpu_graphs.attach import environment as decode_graphs
from sglang_live.errors import StageFailedError
from sglang_live.messages import DuplexFrames, DuplexRequest, HeardFrame, HearRequest, UserSound
from sglang_live.models.moshi.parts import MoshiTalker
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import load_of, total, until
from test.mimi import tiny as tiny_mimi
from test.moshi import checkpoint as tiny
from test.moshi.reference import Reference, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

FAMILY = "sglang_live.models.moshi.family"
N_FRAMES = 130
# Of the frames that moshi 0.2.13 (LMGen) makes of the users 0 to 7, with 300 frames each.
OF_THE_PACKAGE = "911b0cb51770cf79"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("moshi"))


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(tiny.language_model())


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[
        {},
        {"page_size": 16, "disable_overlap_schedule": True},
        {"graphs": True},
    ],
    ids=["page-1", "page-16-no-overlap", "graphs"],
)
async def stages(checkpoint, tmp_path_factory, request):
    cache = tmp_path_factory.mktemp("stages")
    on_graphs = "graphs" in request.param
    args = {"max_running_requests": 16, "max_total_tokens": 26_000}
    args |= {} if on_graphs else request.param
    names = ("talker", "vocoder")
    async with running_stages(
        checkpoint,
        cache,
        names=names,
        family=FAMILY,
        talker_args=args,
        talker_environment=decode_graphs((1, 2, 4, 8)) if on_graphs else {},
    ) as running:
        yield running


def user(seed: int, n_frames: int = N_FRAMES) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.CARD, (n_frames, tiny.N_CODES), generator=rng)


class Talk:
    """A call, frame by frame.

    frames: of the model, as DuplexFrames has them.
    """

    def __init__(self, stages: Stages, name: str, is_known: bool = False, **changes):
        self._is_known = is_known
        client = stages.replica("talker").client
        assert client is not None
        self._job = client.open(f"{name}-talk")
        settings = dict(voice="moshi", role="", temperature=0.0, seed=1, timeout_s=300.0)
        self._request = DuplexRequest(self._job.job_id, **(settings | changes))
        self.frames: list[list[int]] = []
        self.sounds: list[list[int]] = []

    async def __aenter__(self) -> "Talk":
        await self._job.__aenter__()
        await self._job.begin(self._request)
        self._events = self._job.events()
        if not self._is_known:
            await self.take()
        return self

    async def __aexit__(self, *of) -> None:
        await self._events.aclose()
        await self._job.__aexit__(*of)

    async def say(self, codes: torch.Tensor) -> None:
        await self._job.send(HeardFrame(self._job.job_id, codes.numpy().astype("<i2").tobytes()))

    async def take(self, n: int = 1) -> None:
        for _ in range(n):
            message, _ = await asyncio.wait_for(anext(self._events), 60)
            assert isinstance(message, DuplexFrames)
            self.frames.append(np.frombuffer(message.frame, "<i2").tolist())
            if message.codes:
                self.sounds.append(np.frombuffer(message.codes, "<i2").tolist())


async def call(stages: Stages, name: str, heard: torch.Tensor, **changes) -> Talk:
    """A whole call; now and then the user's frames are late, or some come at once."""
    rng = random.Random(name)
    async with Talk(stages, name, **changes) as talk:
        left = list(heard)
        while left:
            n = min(len(left), rng.choice((1, 1, 1, 2, 5)))
            for _ in range(n):
                await talk.say(left.pop(0))
            await talk.take(n)
            if rng.random() < 0.1:
                await asyncio.sleep(0.2 * rng.random())
    return talk


async def test_calls_that_share_batches_equal_the_reference(stages, reference):
    heard = [user(seed) for seed in range(6)]
    talks = await asyncio.gather(*(call(stages, f"talk-{n}", one) for n, one in enumerate(heard)))
    for talk, one in zip(talks, heard, strict=True):
        wanted = reference.call(one)
        assert talk.frames == wanted
        # Codes that are delayed belong to the sound of the frame before.
        assert talk.sounds == [[old[1], *new[2:]] for old, new in pairwise(wanted)]
    assert len({tuple(frame) for frame in talks[0].frames}) > 40, "the case must not be trivial"
    await until(stages, "talker", "requests_running", lambda n: n == 0)
    assert await total(stages, "talker", "kv_tokens_reserved") == 0


@pytest.mark.nightly
async def test_eight_calls_of_300_frames_equal_those_of_the_package(stages):
    heard = [user(seed, 300) for seed in range(8)]
    talks = await asyncio.gather(*(call(stages, f"long-{n}", one) for n, one in enumerate(heard)))
    found = json.dumps([talk.frames for talk in talks])
    assert hashlib.sha256(found.encode()).hexdigest()[:16] == OF_THE_PACKAGE


async def test_a_window_is_that_of_the_masked_reference(stages, reference):
    heard, window, slack = user(50), 24, 64
    page = stages.replica("talker").spec.engine_args.get("page_size", 1)
    talk = await call(stages, f"window-{page}", heard, window_frames=window)
    visible = window_of(1, window, slack, page, len(heard))
    wanted = reference.call(heard, visible=visible)
    assert talk.frames == wanted
    assert wanted != reference.call(heard), "the window must matter"
    assert await total(stages, "talker", "policy_frames_compacted") > 0


def window_of(sink: int, window: int, slack: int, page: int, n_frames: int):
    """Which positions a position attends to: whole pages are dropped, as TalkerWindow does."""
    begin = -(-sink // page) * page
    gone, n_gone = [], 0
    for query in range(n_frames + 1):
        if query - n_gone > sink + window + slack + 2 * page:
            n_gone += (query - n_gone - begin - window) // page * page
        gone.append(n_gone)
    n_gone_at = torch.tensor(gone)

    def visible(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_gone = (key >= begin) & (key < begin + n_gone_at[query])
        return (key <= query) & ~is_gone

    return visible


async def test_a_call_does_not_end(tmp_path_factory):
    """It has more frames than the engine's context, its rows and the model's own context."""
    path = tiny.build(tmp_path_factory.mktemp("short"), context=100)
    args = {"max_running_requests": 4, "max_total_tokens": 2000, "page_size": 1}
    heard, cache = user(80, 1800), tmp_path_factory.mktemp("stages")
    async with (
        running_stages(path, cache, names=("talker",), family=FAMILY, talker_args=args) as stages,
        Talk(stages, "endless") as talk,
    ):
        for frame in heard:
            await talk.say(frame)
            await talk.take()
        await until(stages, "talker", "kv_tokens_used", lambda n: 30 < n < 120)
        load = await load_of(stages, "talker")
        assert load["kv_tokens_reserved"] == 1 + 35 + 64 + 3 + 8
    visible = window_of(1, 100 - 1 - 64, 64, 1, len(heard))
    assert talk.frames == Reference(tiny.language_model()).call(heard, visible=visible)


async def test_a_call_that_memory_could_not_hold_is_refused(stages):
    """At once, instead of a retraction later."""
    async with contextlib.AsyncExitStack() as talks:
        for n in range(8):
            await talks.enter_async_context(Talk(stages, f"fills-{n}"))
        reserved = await until(stages, "talker", "kv_tokens_reserved", lambda n: n > 20_000)
        assert reserved < 40_000
        with pytest.raises(StageFailedError, match="the talker has 8 calls, and memory for"):
            for n in range(8, 16):
                await talks.enter_async_context(Talk(stages, f"fills-{n}"))
    await until(stages, "talker", "kv_tokens_reserved", lambda n: n == 0)


async def test_sampled_calls_depend_on_the_seed_alone(stages):
    heard = user(60, 20)

    async def some(seed: int, name: str) -> list[list[int]]:
        return (await call(stages, name, heard, temperature=None, seed=seed)).frames

    alone = [await some(seed, f"alone-{seed}") for seed in range(3)]
    together = await asyncio.gather(*(some(seed, f"together-{seed}") for seed in range(3)))
    assert alone == list(together)
    assert alone[0] != alone[1]


async def test_a_call_goes_on_behind_the_frames_of_another_engine(stages, reference):
    heard, known = user(70), 40
    wanted = reference.call(heard)
    own = np.asarray(wanted[: known + 1], "<i2")
    before = heard[:known].numpy().astype("<i2")
    changes = dict(own=own.tobytes(), heard=before.tobytes(), n_frames=known + 1)
    # Its next frame needs the user's next one.
    async with Talk(stages, "again", is_known=True, **changes) as talk:
        for frame in heard[known:]:
            await talk.say(frame)
            await talk.take()
    assert talk.frames == wanted[known + 1 :]


async def test_a_user_is_heard_as_mimi_encodes(stages):
    sounds = [tiny_mimi.random_sound(12, seed) for seed in (1, 2, 3)]
    reference = tiny.mimi()
    client = stages.replica("vocoder").client
    assert client is not None

    async def heard(name: str, sound: torch.Tensor) -> torch.Tensor:
        async with client.open(f"{name}-hear") as job:
            await job.begin(HearRequest(job.job_id, 60.0))
            events, found = job.events(), []
            for frame in sound.split(1920):
                pcm = (frame * 32768).round().clamp(-32768, 32767).numpy().astype("<i2")
                await job.send(UserSound(job.job_id, pcm.tobytes()))
                message, _ = await asyncio.wait_for(anext(events), 60)
                found.append(np.frombuffer(message.codes, "<i2"))
            return torch.from_numpy(np.stack(found).astype(np.int64))

    found = await asyncio.gather(*(heard(f"user-{n}", one) for n, one in enumerate(sounds)))
    for codes, sound in zip(found, sounds, strict=True):
        rounded = (sound * 32768).round().clamp(-32768, 32767) / 32768
        assert torch.equal(codes, tiny_mimi.encoded(reference, rounded)[:, : tiny.N_CODES])


async def test_what_cannot_be_is_refused_by_name_and_frees_the_engine(stages):
    async def refused(name: str, **changes) -> str:
        with pytest.raises(StageFailedError) as error:
            async with Talk(stages, name, **changes):
                pass
        return str(error.value)

    assert "voice 'erik' is not one of" in await refused("voice", voice="erik")
    assert "takes no instructions" in await refused("role", role="You are a pirate.")
    client = stages.replica("vocoder").client
    assert client is not None
    async with client.open("rate-hear") as job:
        await job.begin(HearRequest(job.job_id, 60.0))
        await job.send(UserSound(job.job_id, bytes(2 * 1280)))  # of 16 kHz
        with pytest.raises(StageFailedError, match="has 1920 samples, got 1280"):
            await anext(job.events())
    async with Talk(stages, "short") as talk:
        with pytest.raises(StageFailedError, match="has 4 codes, got 3"):
            await talk.say(torch.zeros(3, dtype=torch.int64))
            await talk.take()
    async with Talk(stages, "flood") as talk:
        codes = torch.zeros(4, dtype=torch.int64)
        with pytest.raises(StageFailedError, match="are ahead of the call"):
            await asyncio.gather(talk.take(600), *(talk.say(codes) for _ in range(600)))
    await until(stages, "talker", "requests_running", lambda n: n == 0)


async def test_personaplex_has_a_voice_and_a_role(tmp_path_factory):
    card = tiny.PUBLISHED_CARD
    path = tiny.build(tmp_path_factory.mktemp("personaplex"), kind="personaplex", dep_q=8)
    reference, talker = Reference(tiny.language_model(8, card)), MoshiTalker(path)
    of_voice = {"NATF0": tiny.voice(1), "NATM1": tiny.voice(2)}
    plans = [("NATF0", "hello there"), ("NATM1", ""), ("NATM1", "hello there"), ("NATF0", "you")]
    rng = torch.Generator().manual_seed(9)
    heard = [torch.randint(0, card, (60, tiny.N_CODES), generator=rng) for _ in plans]
    args = {"max_running_requests": 8, "max_total_tokens": 40_000, "chunked_prefill_size": 16}
    cache = tmp_path_factory.mktemp("stages")
    async with running_stages(
        path, cache, names=("talker",), family=FAMILY, talker_args=args
    ) as stages:
        talks = await asyncio.gather(
            *(
                call(stages, f"role-{n}", one, voice=voice, role=role)
                for n, (one, (voice, role)) in enumerate(zip(heard, plans, strict=True))
            )
        )
    for talk, one, (voice, role) in zip(talks, heard, plans, strict=True):
        first = 2 * tiny.TEXT + 1
        ids = [token - tiny.TEXT - 1 for token in talker.prompt(voice, role) if token < first]
        said = ids[5:-6] if role else []
        prompt, before = prompt_of(reference, of_voice[voice], said)
        assert talk.frames == reference.call(one, prompt=prompt, before=before)
