"""Claims about --lend, --borrow and --lend-memory-gib, and what they add to a server."""

import re
from pathlib import Path

import pytest

from sglang_live import devices, model_flags
from sglang_live.arguments import parse
from sglang_live.errors import BadInputError
from sglang_live.extensions.lending.channel import LEASES_ENV
from sglang_live.extensions.lending.lending import Lending
from sglang_live.extensions.lending.policy import LeaseConfig
from sglang_live.model_flags import check_flags
from sglang_live.models.family import ModelFacts
from sglang_live.stage_specs import stage_specs

HOST_TIER = ["--thinker.enable-hierarchical-cache", "--live-policies", "next-use"]
LEASES = [*HOST_TIER, "--lend", "talker", "--borrow", "thinker"]
BORROWS = [*HOST_TIER, "--borrow", "thinker"]
MODEL = ModelFacts(
    path=Path("/models/m"),
    weights=Path("/models/m"),
    family="sglang_live.models.qwen3_omni.family",
    voices=("a",),
    vocab_size=100,
    context_tokens=1000,
)


def parsed(*argv: str):
    return parse(["--model-path", "/models/m", *argv])


def leases(*argv: str) -> LeaseConfig:
    [config] = [one._config for one in parsed(*argv).additions if isinstance(one, Lending)]
    return config


def specs(*argv: str) -> dict:
    listed = stage_specs(parsed(*argv), MODEL, Path("/tmp/run"), native_key="key")
    return {spec.name: spec for spec in listed}


def test_stages_neither_lend_nor_borrow_by_default():
    assert not any(isinstance(one, Lending) for one in parsed().additions)
    assert leases(*LEASES) == LeaseConfig(roles={"talker": "lend", "thinker": "borrow"})


def test_stages_with_the_same_number_of_ranks_lend_to_each_other():
    assert leases(*LEASES, "--tp-size", "2") == leases(*LEASES)


def test_a_process_without_an_engine_lends_to_a_thinker_alone():
    config = leases(*BORROWS, "--lend-memory-gib", "1.5")
    assert config == LeaseConfig(roles={"thinker": "borrow"}, lent_bytes=3 << 29)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--lend", "talker"], "nor they without it"),
        (["--lend-memory-gib", "1"], "nor they without it"),
        (["--borrow", "thinker"], "gains nothing without --lend or --lend-memory-gib"),
        ([*BORROWS, "--lend-memory-gib", "-1"], "lend-memory-gib must be"),
        ([*BORROWS, "--lend-memory-gib", "nan"], "lend-memory-gib must be"),
        ([*BORROWS, "--lend-memory-gib", "0.01"], "less than one lease"),
        (["--lend", "vocoder", "--borrow", "thinker"], "--lend vocoder: thinker and talker have"),
        (["--lend", "thinker", "--borrow", "talker"], "--borrow talker: thinker have sessions"),
        (["--lend", "thinker", "--borrow", "thinker"], "could wait for the other's pages"),
        (["--lend", "talker", "--borrow", "thinker"], "needs the policy next-use"),
        ([*LEASES, "--live-policies", "off"], "needs the policy next-use"),
        ([*LEASES, "--talker.tp-size", "2"], "--lend talker: it has 2 ranks (--talker.tp-size)"),
        ([*LEASES, "--tp-size", "2", "--thinker.pp-size", "2"], "--thinker.pp-size 2: a stage"),
        ([*LEASES, "--tp-size", "2", "--talker.nnodes", "2"], "--talker.nnodes 2: a stage that"),
    ],
)
def test_leases_without_a_gain_are_refused_with_the_reason(flags, reason):
    with pytest.raises(BadInputError, match=re.escape(reason)):
        parsed(*flags)


def test_the_engines_of_a_pair_know_their_roles(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    by_name = specs(*LEASES)
    roles = {name: spec.environment.get(LEASES_ENV) for name, spec in by_name.items()}
    path = "/tmp/run/leases"
    assert roles == {
        "thinker/0": f"borrow:{path}",
        "talker/0": f"lend:{path}",
        "vocoder/0": None,
    }
    assert [len(spec.parts) for spec in by_name.values()] == [1, 1, 0]
    sized = [
        spec.environment.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING") for spec in by_name.values()
    ]
    assert sized == [None, "0", None]


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_each_thinker_that_borrows_has_a_lender_of_its_own(n_ranks):
    ranks = ("--thinker.tp-size", str(n_ranks))
    by_name = specs(*BORROWS, "--lend-memory-gib", "2", *ranks, "--thinker.replicas", "2")
    lenders = [spec for name, spec in by_name.items() if name.startswith("lender/")]
    assert [spec.name for spec in lenders] == ["lender/0", "lender/1"]
    assert len({spec.address for spec in by_name.values()}) == len(by_name)
    assert all(spec.engine_args == {"n_bytes": 2 << 30, "n_ranks": n_ranks} for spec in lenders)
    assert all(spec.factory and not spec.parts for spec in lenders)
    assert not any(name.startswith("lender/") for name in specs())


def test_lent_memory_is_of_a_device_that_exists(monkeypatch):
    monkeypatch.setattr(devices, "n_cuda_devices", lambda: 0)
    flags = [*BORROWS, "--lend-memory-gib", "1"]
    devices.check_devices([used for one in parsed(*flags).additions for used in one.devices()])
    named = parsed(*flags, "--lend-memory-device", "cuda").additions
    with pytest.raises(BadInputError, match="--lend-memory-device: there is no device cuda:0"):
        devices.check_devices([used for one in named for used in one.devices()])


def test_on_the_cpu_this_machine_has_the_lent_memory(monkeypatch):
    monkeypatch.setattr(model_flags, "memory_bytes", lambda: 1 << 30)
    config = parsed(*BORROWS, "--lend-memory-gib", "2")
    monkeypatch.setattr(model_flags, "n_cuda_devices", lambda: 1)
    check_flags(config, MODEL)
    monkeypatch.setattr(model_flags, "n_cuda_devices", lambda: 0)
    with pytest.raises(BadInputError, match="--lend-memory-gib 2: it takes 2 GiB, and this"):
        check_flags(config, MODEL)
