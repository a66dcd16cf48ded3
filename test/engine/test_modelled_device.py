"""Engines on a modelled device: the same tokens and codes, and rates that are the device's."""

import asyncio
import random
from collections.abc import Iterable

import pytest
import pytest_asyncio

from lab.attachment import joined
from lab.recorders import batch_recorder, wait_recorder
from lab.recorders.batch_recorder import read_record
from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.ids import THINK_PREFIX
from sglang_live.policy.view import StageRates
from test.engine import parity_claims
from test.engine.conftest import DEVICE_MODELS, Stages, running_stages
from test.engine.test_pauses import Thinker
from test.engine.turns import greedy_turn, think, user
from test.unit.bridge.device_waits import REASONS, REASONS_AT_RUNTIME

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

MODEL = load_device_model(DEVICE_MODELS / "slow_rounds.toml")
N_STREAMS = 4


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=[False, True], ids=["overlap", "no-overlap"]
)
async def stages(request, endless_checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("modelled")
    waits = wait_recorder.environment(cache / "waits")
    batches = batch_recorder.environment(cache / "batches")
    running = running_stages(
        endless_checkpoint,
        cache,
        {"disable_overlap_schedule": request.param},
        policies=("urgency", "pacing", "truncate"),
        device_model="slow_rounds",
        talker_environment=waits,
        thinker_environment=joined(waits, batches),
        names=("thinker", "talker"),
    )
    async with running as found:
        found.waits, found.batches = cache / "waits", cache / "batches"
        yield found


async def test_codes_are_those_of_the_plain_cpu(stages, reference, speech):
    await parity_claims.talker_matches_the_reference(stages, reference, speech, 20)
    assert (await load_of(stages, "talker"))["device_batches"] > 20


async def mixed_load(stages: Stages, thinker: Thinker, speech) -> None:
    """Prompts of many sizes beside decodes, with and without audio; some of each alone at first."""
    rng = random.Random(7)
    sampling = {"max_new_tokens": 10, "temperature": 0}

    async def ask(number: int) -> None:
        prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 150))]
        await thinker.generate(f"{THINK_PREFIX}{number:08d}-mixed", prompt, sampling)

    async def hear(number: int) -> None:
        links = stages.links(f"mixed-{number}")
        clip = speech[: 16_000 * rng.randrange(1, 9)]
        await think(links, greedy_turn(user(clip), system="", n_tokens=8))
        links.close()

    async def late(request) -> None:
        await asyncio.sleep(rng.uniform(0.0, 6.0))
        await request

    for number in range(4):
        await ask(number)
    for number in range(2):
        await hear(number)
    requests = [*map(ask, range(4, 16)), *map(hear, range(2, 6))]
    await asyncio.gather(*map(late, requests))


async def test_rates_are_those_of_the_booked_batches_over_a_mixed_load(stages, speech):
    thinker = Thinker(stages)
    await mixed_load(stages, thinker, speech)
    sampling = {"max_new_tokens": 40, "temperature": 0}
    rids = [f"{THINK_PREFIX}{number:08d}-equal" for number in range(N_STREAMS)]
    await asyncio.gather(*(thinker.generate(rid, [20, 30, 40], sampling) for rid in rids))
    load = await load_of(stages, "thinker")
    record = read_record(stages.batches)

    told = rates_after((batch.work, batch.launched_s, batch.arrived_s) for batch in record)
    for name, value in in_ms(told).items():
        assert load[f"policy_{name}"] == pytest.approx(value), name

    # Each batch was booked with its own work and at its own end, neither those of another.
    costs = MODEL.thinker
    for batch in record:
        work, took_s = batch.work, batch.done_s - batch.began_s
        if work.n_streams:
            least_s = costs.decode_s(work.n_streams, 0)
            assert least_s <= took_s < least_s + 1e-3, batch
        else:
            assert took_s == pytest.approx(costs.prefill_s(work.n_tokens, work.audio_s)), batch
        assert batch.arrived_s >= batch.done_s

    on_time = rates_after((batch.work, batch.began_s, batch.done_s) for batch in record)
    found = in_ms(on_time)
    assert found["prefill_ms_per_token"] == pytest.approx(
        costs.prefill_per_token_us / 1e3, rel=0.05
    )
    assert found["round_ms"] == pytest.approx(1e3 * costs.decode_s(N_STREAMS, 150), rel=0.05)
    assert found["prefill_ms_fixed"] == pytest.approx(costs.prefill_fixed_ms, rel=0.05)
    assert found["encoder_ms_per_audio_s"] == pytest.approx(costs.encoder_per_audio_s_ms, rel=0.05)


def rates_after(batches: Iterable[tuple[BatchWork, float, float]]) -> StageRates:
    """Rates from batches: work, launch and arrival in seconds."""
    meter = RateMeter()
    for work, launched_s, arrived_s in batches:
        meter.arrived(Launch(work, launched_s), arrived_s)
    return meter.rates(0.0)


def in_ms(rates: StageRates) -> dict[str, float]:
    return {
        "round_ms": 1e3 * rates.round_s,
        "prefill_ms_fixed": 1e3 * rates.prefill_s_fixed,
        "prefill_ms_per_token": 1e3 * rates.prefill_s_per_token,
        "encoder_ms_per_audio_s": 1e3 * rates.encoder_s_per_audio_s,
    }


async def load_of(stages: Stages, stage: str) -> dict[str, float]:
    await asyncio.sleep(1.0)  # the scheduler reports twice a second
    return (await stages.replica(stage).client.ping(5.0)).load


async def test_schedulers_read_tensors_in_listed_places_only(stages):
    """On a GPU a read of the device's tensors would wait for it."""
    read = {tuple(line.split()[:2]) for line in stages.waits.read_text().splitlines()}
    listed = {(file, place.split()[0]) for file, places in REASONS.items() for place in places}
    assert ("models/speech_lm/engine/steps.py", "all_greedy") in read
    assert read - listed - REASONS_AT_RUNTIME.keys() == set()
