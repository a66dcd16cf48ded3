"""Thinker and talker on graphs: steps and prefills whose layers run no Python, padded to captured
sizes.

Requests join, pause, are retracted and end at random times, in batches that fit a captured size,
are padded to one, or are larger than all. Tokens and codes are those of eager engines.
"""

import asyncio
import random
import re
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from lab.cpu_graphs.attach import environment as graphs
from test.engine import parity_claims
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import until
from test.engine.test_pauses import hear, pause_patterns
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

POLICIES = ("urgency", "pacing", "truncate")
# The largest prefill graph is smaller than a chunk.
GRAPHS = graphs((1, 2, 4), prefill=(4, 16, 32, 48))
# SGLang takes the KV and the row of a running response away every few rounds.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
ENGINE_ARGS = {"chunked_prefill_size": 64}
# Kinds of responses; more run at once than the largest captured size.
N_KINDS, N_FRAMES = 7, 60


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "no-overlap"])
def retracts(request) -> bool:
    """Without overlap, the talker's running responses are retracted, too."""
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def graph_stages(retracts, endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("graphs")
    stages = running_stages(
        endless_checkpoint,
        cache,
        ENGINE_ARGS | {"disable_overlap_schedule": retracts},
        talker_environment=GRAPHS | (RETRACT if retracts else {}),
        thinker_environment=GRAPHS,
        policies=POLICIES,
        names=("thinker", "talker"),
    )
    async with stages as running:
        yield running


async def test_the_thinker_matches_the_reference_on_audio(graph_stages, reference, speech):
    await parity_claims.turns_equal_one_stateless_run(graph_stages, reference, speech)


@pytest.mark.nightly
async def test_streams_that_starve_match_the_reference(graph_stages, reference, speech):
    await parity_claims.eight_starving_streams_match(graph_stages, reference, speech, 40)


@dataclass(frozen=True, slots=True)
class Response:
    """One response in a random load.

    kind: determines its tokens and codes.
    start_s, pace_s: when it begins, and the time between its tokens of text.
    n_frames: its client leaves after as many.
    listener: seed of how it is played, and paused; None: it is not paused.
    """

    kind: int
    start_s: float = 0.0
    pace_s: float = 0.0
    n_frames: int = N_FRAMES
    listener: int | None = None


class Kinds:
    """The responses of all kinds: greedy and sampled, to text and to audio."""

    def __init__(self, speech: np.ndarray):
        self._speech = speech

    def turn(self, kind: int):
        said = self._speech[4_000 * kind :][:16_000] if kind % 3 == 0 else f"tell me {kind}"
        turn = greedy_turn(user(said), system="", n_tokens=20 + 6 * kind)
        if kind % 2:
            turn = replace(turn, seed=100 + kind)
        return turn

    async def run(self, stages: Stages, name: str, response: Response):
        """Its tokens, and its codes [n_frames, num_code_groups]."""
        turn = self.turn(response.kind)
        links = stages.links(f"{name}-{response.kind}-{response.listener}")
        await asyncio.sleep(response.start_s)
        done = await think(links, turn)
        speaks = replace(turn, temperature=None) if response.kind % 2 else turn
        codes = await self._speak(links, speaks, response)
        links.close()
        return done.ids, codes

    async def _speak(self, links, turn, response: Response) -> np.ndarray:
        async with links.talker.open(turn) as speech:
            beside = [asyncio.create_task(self._write(speech, response))]
            if response.listener is not None:
                chance = random.Random(response.listener)
                beside.append(asyncio.create_task(hear(speech, chance)))
            frames: list[np.ndarray] = []
            try:
                async with aclosing(speech.frames()) as chunks:
                    async for codes in chunks:
                        frames.extend(np.frombuffer(codes, "<i2").reshape(-1, 16))
                        if len(frames) >= response.n_frames:
                            break
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
        return np.stack(frames[: response.n_frames])

    @staticmethod
    async def _write(speech, response: Response) -> None:
        for token_id in range(20 + response.kind, 90 + response.kind):
            await speech.write([token_id], "a")
            await asyncio.sleep(response.pace_s)
        await speech.end_text()


@pytest.fixture(scope="module")
def kinds(speech) -> Kinds:
    return Kinds(speech)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def eager(stages, kinds) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and codes of each kind, on engines without graphs."""
    runs = [kinds.run(stages, "eager", Response(kind)) for kind in range(N_KINDS)]
    return await asyncio.gather(*runs)


responses = st.builds(
    Response,
    kind=st.integers(0, N_KINDS - 1),
    start_s=st.sampled_from((0.0, 0.0, 0.2, 0.7)),
    pace_s=st.sampled_from((0.0, 0.01, 0.05)),
    n_frames=st.sampled_from((5, 20, N_FRAMES)),
    listener=st.none() | st.integers(0, 1000),
)


async def run_together(
    stages: Stages, kinds: Kinds, eager: list[tuple[list[int], np.ndarray]], load: list[Response]
) -> None:
    name = f"graph-{random.Random(repr(load)).randrange(1 << 32)}"
    runs = [kinds.run(stages, f"{name}-{i}", one) for i, one in enumerate(load)]
    for one, (ids, codes) in zip(load, await asyncio.gather(*runs), strict=True):
        expected_ids, expected_codes = eager[one.kind]
        assert ids == expected_ids
        np.testing.assert_array_equal(codes, expected_codes[: one.n_frames])


async def test_a_batch_that_shrinks_crosses_all_captured_sizes(graph_stages, kinds, eager):
    load = [Response(kind, n_frames=6 + 9 * kind) for kind in range(N_KINDS)]
    captured = {1, 2, 3, 4}  # 3 is padded to 4
    for _ in range(8):  # on a busy machine not every load has batches of every size
        await run_together(graph_stages, kinds, eager, load)
        sizes = [decoded_sizes(graph_stages, stage) for stage in ("thinker", "talker")]
        if all(r == captured and max(n, default=0) > 4 for r, n in sizes):
            break
    for replayed, not_replayed in sizes:
        assert replayed == captured
        assert min(not_replayed) > 4


def decoded_sizes(stages: Stages, stage: str) -> tuple[set[int], set[int]]:
    """Sizes of the batches that were replayed, and of the others."""
    log = stages.supervisor.log_of(f"{stage}/0")
    batches = re.findall(r"decode_graph batch=(\d+) replayed=(True|False)", log)
    replayed = {int(n) for n, is_replayed in batches if is_replayed == "True"}
    return replayed, {int(n) for n, is_replayed in batches if is_replayed == "False"}


async def test_prefills_are_replayed_too(graph_stages, kinds, eager):
    await run_together(graph_stages, kinds, eager, [Response(kind) for kind in range(N_KINDS)])
    for stage in ("thinker", "talker"):
        log = graph_stages.supervisor.log_of(f"{stage}/0")
        assert len(re.findall(r"prefill_graph tokens=(\d+) replayed=True", log)) > 1, stage


@pause_patterns(8)
@given(load=st.lists(responses, min_size=1, max_size=8))
async def test_tokens_and_codes_equal_eager_engines(graph_stages, kinds, eager, load):
    await run_together(graph_stages, kinds, eager, load)


async def test_the_loads_did_pause_and_retract(graph_stages, retracts):
    """Otherwise the claims above would be empty."""
    await until(graph_stages, "talker", "policy_pauses", lambda n: n > 0)
    if retracts:
        assert "Testing retraction" in graph_stages.supervisor.log_of("talker/0")
