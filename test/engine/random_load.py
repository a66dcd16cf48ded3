"""Users at random on a thinker and a talker, and the comparison of what their ranks logged.

    python -m test.engine.random_load --rounds 10000 [--ranks 2]

runs until thinker and talker have logged that number of rounds, and prints what happened.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import soundfile as sf

from benchmark.native_client import native_client
from lab import round_log
from lab.attachment import joined
from lab.poison import POISON
from sglang_live.ids import BATCH_PREFIX
from sglang_live.messages import NextUseHint, RetainSession, TruncateSession, UserSpeaking
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.policy.policies import POLICIES, Policies
from test.engine.conftest import DATA, ZYGOTE, Stages, running_stages
from test.engine.small_pool import Pool
from test.engine.turns import greedy_turn, user

ALL = tuple(Policies.parse(POLICIES).names)
# Memory of a few sessions: they are evicted to the host and to storage, and requests retracted.
ARGS = {"max_total_tokens": 1024, "max_running_requests": 24, "chunked_prefill_size": 64}
HOST = {"enable_hierarchical_cache": True, "hicache_ratio": 1.5}
STORAGE_BYTES = 1 << 21
N_TEXT, N_SPEAKING = 10, 5


@contextlib.asynccontextmanager
async def stages_of_ranks(checkpoint: Path, folder: Path, n_ranks: int) -> AsyncIterator[Stages]:
    """Thinker and talker with every policy; each rank logs its rounds in the folder."""
    log = round_log.environment(folder)
    running = running_stages(
        checkpoint,
        folder,
        ARGS | {"tp_size": n_ranks},
        talker_environment=log,
        thinker_environment=joined(log, POISON),
        policies=ALL,
        thinker_args=HOST,
        session_storage=f"{STORAGE_BYTES}:{folder}",
        # Ranks queue on one link: a transfer takes some rounds, and ends at another time on each.
        device_model="slow_link",
        shares_device=True,
        names=("thinker", "talker"),
    )
    async with running as stages:
        yield stages


class RandomLoad:
    """
    Args:
        folder: of the ranks' logs.
        n_rounds: of each engine, after which users leave.
    """

    def __init__(self, stages: Stages, folder: Path, n_rounds: int, seed: int):
        self._stages, self._folder, self._n_rounds, self._seed = stages, folder, n_rounds, seed
        self._pool, self._is_over = Pool(stages), False

    async def run(self) -> None:
        users = [self._writes(n) for n in range(N_TEXT)]
        users += [self._speaks(n) for n in range(N_SPEAKING)]
        ending = asyncio.create_task(self._end())
        try:
            await asyncio.gather(*users)
        finally:
            ending.cancel()

    async def _end(self) -> None:
        while min(n_rounds(self._folder, name) for name in ("thinker", "talker")) < self._n_rounds:
            await asyncio.sleep(0.5)
        self._is_over = True

    async def _writes(self, n: int) -> None:
        """Sessions over SGLang's own API, and requests without a session."""
        rng = random.Random(f"{self._seed} text {n}")
        for name in (f"text-{n}-{i}" for i in itertools.count()):
            if self._is_over:
                return
            await self._pool.open(name)
            if rng.random() < 0.7:
                self._pool.feed.send(RetainSession(name, 12, 64, 1, every_request=True))
            for _ in range(rng.randrange(2, 12)):
                await self._turn(name, rng)
            if rng.random() < 0.3:
                # The session is closed when its request has ended.
                running = asyncio.create_task(self._say(name, rng))
                await asyncio.sleep(rng.random() / 10)
                await self._pool.close(name)
                await running
            else:
                await self._pool.close(name)

    async def _turn(self, name: str, rng: random.Random) -> None:
        feed = self._pool.feed
        if rng.random() < 0.5:
            hint = NextUseHint(name, rng.uniform(0.0, 3.0), rng.uniform(0.1, 2.0), rng.random())
            feed.send(hint)
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.3)))
        if rng.random() < 0.5:
            feed.send(UserSpeaking(name))
            await asyncio.sleep(rng.choice((0.0, 0.02, 0.2)))
        if rng.random() < 0.2:
            feed.send(TruncateSession(name, rng.randrange(1, 120)))
        await self._say(name if rng.random() < 0.9 else None, rng)

    async def _say(self, session: str | None, rng: random.Random) -> None:
        """A request that may be refused, because its session closes, or be aborted."""
        is_best_effort = rng.random() < (0.1 if session else 0.6)
        prefix = BATCH_PREFIX if is_best_effort else "random-"
        rid = f"{prefix}{rng.getrandbits(64):016x}"
        n_prompt = rng.randrange(5, 40) if session else rng.randrange(5, 150)
        body = {
            "rid": rid,
            "input_ids": [rng.randrange(10, 200) for _ in range(n_prompt)],
            "sampling_params": {
                "max_new_tokens": rng.randrange(1, 30),
                "temperature": rng.choice((0.0, 0.9)),
                "repetition_penalty": rng.choice((1.0, 1.2)),
            },
        }
        if session:
            body["session_params"] = {"id": session}
        aborting = asyncio.create_task(self._abort(rid, rng)) if rng.random() < 0.1 else None
        async with native_client(self._pool.spec, 180) as client:
            response = await client.post("/generate", json=body)
        assert response.status_code in (200, 400), response.text
        if aborting is not None:
            await aborting

    async def _abort(self, rid: str, rng: random.Random) -> None:
        await asyncio.sleep(rng.random() / 5)
        await self._pool.post("/abort_request", {"rid": rid})

    async def _speaks(self, n: int) -> None:
        """Conversations through both stages; a listener plays, and sometimes interrupts."""
        rng = random.Random(f"{self._seed} speech {n}")
        sound, _ = sf.read(DATA / "sp_jfk.flac", dtype="int16")
        for i in itertools.count():
            if self._is_over:
                return
            links = self._stages.links(f"speech-{n}-{i}")
            history: list = []
            for _ in range(rng.randrange(1, 4)):
                clip = sound[: rng.randrange(8_000, 48_000)]
                history.append(user(clip if rng.random() < 0.7 else "tell me more"))
                turn = greedy_turn(*history, system="Be kind.", n_tokens=rng.randrange(4, 40))
                turn = replace(turn, temperature=rng.choice((0.0, 0.8)), seed=rng.getrandbits(30))
                await self._turn_of_speech(links, turn, rng)
            links.close()

    async def _turn_of_speech(self, links, turn, rng: random.Random) -> None:
        n_frames = rng.randrange(1, 60)
        async with links.thinker.open(turn) as thought, links.talker.open(turn) as speech:
            writing = asyncio.create_task(_write(thought, speech))
            hearing = asyncio.create_task(_hear((thought, speech), rng))
            try:
                async with aclosing(speech.frames()) as chunks:
                    async for codes in chunks:
                        n_frames -= len(codes) // 32
                        if n_frames < 0:
                            break  # the user interrupts
            finally:
                for task in (writing, hearing):
                    task.cancel()
                ends = await asyncio.gather(writing, hearing, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end


async def _write(thought, speech) -> None:
    try:
        async for tokens in thought.tokens():
            await speech.write(tokens.ids, "a")
    except Exception:
        await speech.end_text()  # otherwise its frames would be waited for
        raise
    await speech.end_text()


async def _hear(jobs, rng: random.Random) -> None:
    """Play in random steps, faster than speech is; every other listener pauses first.

    Ranks that share two cores speak more slowly than that: only a pause lets them get ahead.
    """
    heard_s = 0.0
    pause_s = rng.uniform(4.0, 9.0) if rng.random() < 1 / 2 else 0.0
    while True:
        for job in jobs:
            job.report(heard_s, False)
        step_s = rng.uniform(0.05, 0.3)
        await asyncio.sleep(step_s)
        pause_s -= step_s
        if pause_s <= 0.0:
            heard_s += rng.choice((0.0, 0.1, 0.2, 0.8))


def n_rounds(folder: Path, stage: str) -> int:
    """Rounds with a batch that rank 0 of a stage has logged."""
    with (folder / f"{stage}-rank0.jsonl").open("rb") as log:
        return sum(1 for _ in log)


async def settled(folder: Path) -> None:
    """Wait until no rank logs any more."""
    before: list[int] = []
    while (sizes := [path.stat().st_size for path in sorted(folder.glob("*-rank*"))]) != before:
        before = sizes
        await asyncio.sleep(1.5)


def compared(folder: Path, stage: str) -> int:
    """The number of a stage's rounds on which all its ranks agree.

    Raises:
        AssertionError: with what differs in the first round on which they do not.
    """
    first, *others = sorted(folder.glob(f"{stage}-rank*"))
    n = 0
    for other in others:
        with first.open() as ours, other.open() as theirs:
            for n, (a, b) in enumerate(itertools.zip_longest(ours, theirs), 1):
                if a != b:
                    raise AssertionError(f"{stage}, line {n}: {_difference(a, b)}")
    return n


def _difference(a: str | None, b: str | None) -> str:
    if a is None or b is None:
        return f"one rank alone logged {a or b}"
    x, y = json.loads(a), json.loads(b)
    names = [name for name in x.keys() | y.keys() if x.get(name) != y.get(name)]
    return "; ".join(f"{name}: {x.get(name)} against {y.get(name)}" for name in sorted(names))


async def _main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, checkpoint = Path(temporary) / "logs", Path(temporary) / "endless"
        folder.mkdir()
        build(checkpoint, DemoSize(thinker_end_logit=0.0, talker_end_logit=0.0))
        async with stages_of_ranks(checkpoint, folder, args.ranks) as stages:
            await RandomLoad(stages, folder, args.rounds, args.seed).run()
            await settled(folder)
            for name in ("thinker", "talker"):
                print(f"{name}: {compared(folder, name)} rounds on which all ranks agree")
                load = (await stages.replica(name).client.ping(5.0)).load
                print({k: v for k, v in sorted(load.items()) if k.startswith("policy_") and v})
    if ZYGOTE is not None:
        await ZYGOTE.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(_main(parser.parse_args()))
