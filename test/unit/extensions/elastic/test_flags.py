"""Claims about --elastic-kv, and what it adds to a server."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_live.arguments import parse
from sglang_live.errors import BadInputError
from sglang_live.extensions.elastic.messages import ELASTIC_ENV
from sglang_live.model_flags import check_flags
from sglang_live.models.family import ModelFacts
from sglang_live.stage_specs import stage_specs

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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--live-policies", "off"], "--elastic-kv needs policies"),
        (["--talker.replicas", "2"], "--elastic-kv needs one talker"),
        (["--thinker.tp-size", "2"], "--elastic-kv needs a thinker of one rank"),
        (["--talker.device", "cuda:1"], "a thinker and a talker on one device"),
        (
            ["--lend", "talker", "--borrow", "thinker", "--thinker.enable-hierarchical-cache"],
            "memory is moved or lent, not both",
        ),
    ],
)
def test_pools_that_cannot_exchange_memory_are_refused(argv, message):
    with pytest.raises(BadInputError, match=message):
        parsed("--elastic-kv", *argv)


def test_a_model_of_one_engine_is_refused():
    alone = replace(MODEL, stages=("thinker", "vocoder"))
    with pytest.raises(BadInputError, match="--elastic-kv: this model has no other engine"):
        check_flags(parsed("--elastic-kv"), alone)


def test_the_engines_alone_have_elastic_kv(monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    off, on = (
        {spec.stage: spec for spec in stage_specs(parsed(*argv), MODEL, Path("/tmp/run"), "key")}
        for argv in ((), ("--elastic-kv",))
    )
    assert not any(spec.environment or spec.parts for spec in (*off.values(), on["vocoder"]))
    for stage in ("thinker", "talker"):
        environment = on[stage].environment
        assert json.loads(environment[ELASTIC_ENV]) == ["/tmp/run/kv-mover", stage]
        assert environment["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] == "0"
        assert len(on[stage].parts) == 1
