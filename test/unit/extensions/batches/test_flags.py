"""Claims about the flags of the Batch API."""

from pathlib import Path

import pytest

from sglang_live.arguments import parse
from sglang_live.errors import BadInputError
from sglang_live.extensions.batches.api import Batches
from sglang_live.extensions.batches.extension import NoBatches
from sglang_live.models.family import ModelFacts
from sglang_live.stage_specs import stage_specs


def added(*argv: str) -> list[Batches | NoBatches]:
    additions = parse(["--model-path", "demo", *argv]).additions
    return [one for one in additions if isinstance(one, Batches | NoBatches)]


def test_a_folder_for_batches_has_limits_of_its_own():
    [batches] = added("--batch-dir", "/b", "--batch-at-once", "3", "--batch-gib-per-key", "0.5")
    assert isinstance(batches, Batches) and batches.folder == Path("/b")
    assert (batches.config.at_once, batches.config.max_key_bytes) == (3, 1 << 29)
    [off] = added()
    assert isinstance(off, NoBatches)


@pytest.mark.parametrize("flag", ["--batch-at-once", "--batch-gib-per-key"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_limits_are_positive(flag, value):
    with pytest.raises(BadInputError, match=flag.removeprefix("--")):
        added(flag, value)


@pytest.mark.parametrize(("argv", "more"), [((), 0), (("--batch-dir", "/b"), 5)])
def test_lines_have_streams_beside_those_of_sessions(argv, more):
    path = Path("/models/m")
    model = ModelFacts(
        path=path,
        weights=path,
        family="sglang_live.models.qwen3_omni.family",
        voices=("a",),
        vocab_size=100,
        context_tokens=1000,
    )
    sizes = ("--max-sessions", "3", "--flex-at-once", "1", "--batch-at-once", "5")
    config = parse(["--model-path", "demo", *sizes, *argv])
    by_name = {spec.name: spec for spec in stage_specs(config, model, Path("/run"), "key")}
    assert by_name["vocoder/0"].engine_args["max_streams"] == 36 + more
