"""Engines on a modelled device: the same tokens and codes, and rates that are the device's."""

import asyncio
import random

import pytest
import pytest_asyncio

from sglang_live.bridge.modelled.wait_recorder import WAIT_RECORD_ENV
from sglang_live.device_model.model import load_device_model
from sglang_live.engine_channel.messages import THINK_PREFIX
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
    record = {WAIT_RECORD_ENV: str(cache / "waits")}
    running = running_stages(
        endless_checkpoint,
        cache,
        {"disable_overlap_schedule": request.param},
        policies=("urgency", "pacing", "truncate"),
        device_model="slow_rounds",
        talker_environment=record,
        thinker_environment=record,
        names=("thinker", "talker"),
    )
    async with running as found:
        found.record = cache / "waits"
        yield found


async def test_codes_are_those_of_the_plain_cpu(stages, reference, speech):
    await parity_claims.talker_matches_the_reference(stages, reference, speech, 20)
    assert (await load_of(stages, "talker"))["device_batches"] > 20


async def mixed_load(stages: Stages, thinker: Thinker, speech) -> None:
    """Prompts of many sizes beside decodes, with and without audio."""
    rng = random.Random(7)

    async def ask(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 6.0))
        prompt = [rng.randrange(10, 200) for _ in range(rng.randrange(5, 150))]
        await thinker.generate(
            f"{THINK_PREFIX}{number:08d}-mixed", prompt, {"max_new_tokens": 10, "temperature": 0}
        )

    async def hear(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 6.0))
        links = stages.links(f"mixed-{number}")
        clip = speech[: 16_000 * rng.randrange(1, 9)]
        await think(links, greedy_turn(user(clip), system="", n_tokens=8))
        links.close()

    await asyncio.gather(*map(ask, range(16)), *map(hear, range(6)))


async def test_measured_rates_are_the_devices_over_a_mixed_load(stages, speech):
    thinker, costs = Thinker(stages), MODEL.thinker
    before = await load_of(stages, "thinker")
    await mixed_load(stages, thinker, speech)
    sampling = {"max_new_tokens": 40, "temperature": 0}
    rids = [f"{THINK_PREFIX}{number:08d}-equal" for number in range(N_STREAMS)]
    await asyncio.gather(*(thinker.generate(rid, [20, 30, 40], sampling) for rid in rids))
    load = await load_of(stages, "thinker")
    # A late machine lengthens batches beyond the modelled time, on average by this share.
    late_s, modelled_s = (
        load[name] - before[name] for name in ("device_late_s", "device_modelled_s")
    )
    for name, value, error in (
        ("policy_prefill_ms_per_token", costs.prefill_per_token_us / 1000, 0.05),
        ("policy_round_ms", 1000 * costs.decode_s(N_STREAMS, 150), 0.05),
        ("policy_prefill_ms_fixed", costs.prefill_fixed_ms, 0.1),
        ("policy_encoder_ms_per_audio_s", costs.encoder_per_audio_s_ms, 0.1),
    ):
        assert load[name] == pytest.approx(value, rel=error + 3 * late_s / modelled_s), name


async def load_of(stages: Stages, stage: str) -> dict[str, float]:
    await asyncio.sleep(1.0)  # the scheduler reports twice a second
    return (await stages.replica(stage).client.ping(5.0)).load


async def test_schedulers_read_tensors_in_listed_places_only(stages):
    """On a GPU a read of the device's tensors would wait for it."""
    read = {tuple(line.split()[:2]) for line in stages.record.read_text().splitlines()}
    listed = {(file, place.split()[0]) for file, places in REASONS.items() for place in places}
    assert ("models/speech_lm/engine/talker.py", "SpeechLM._all_greedy") in read
    assert read - listed - REASONS_AT_RUNTIME.keys() == set()
