"""A flow's graphs: batches that are padded to captured shapes, on tapes in the place of CUDA's."""

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lab.cpu_graphs.tape import Tape
from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import AHEAD, CHUNK, padding
from sglang_live.models.codecs.flow.mels import FlowInput, TokenFlow
from sglang_live.models.codecs.flow.padding import (
    LONGEST_CODES,
    MOST_PAIRS,
    padded_codes,
    padded_shape,
    padded_streams,
)
from sglang_live.models.codecs.hift import HiftState, hift_of
from test.flow import checkpoint as tiny

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "test" / "fake_cuda"))
from fake_cuda import ENVIRONMENT  # noqa: E402

READS = {f"aten::{name}" for name in ("equal", "item", "is_nonzero", "nonzero", "allclose")}
MODELS = ("CosyVoice 2", "CosyVoice 3", "Chatterbox", "Turbo")


class Captures:
    """Each replay makes the calls of one tape again, without the Python that made them."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, call: Callable) -> Callable:
        self.n += 1
        tape = Tape()
        with tape.recording():
            outputs = call()

        def replay():
            tape.replay()
            return outputs

        return replay


def flow_of(name: str, dtype: torch.dtype = torch.float32) -> TokenFlow:
    if name.startswith("CosyVoice"):
        module, _ = tiny.modules(int(name[-1]))
    else:
        module = tiny.s3gen(name == "Turbo").flow
    return TokenFlow(dict(module.state_dict()), torch.device("cpu"), dtype)


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


def batch(flow: TokenFlow, rng: random.Random, sizes: list[int]) -> list[FlowInput]:
    """Streams of these numbers of codes, of any voices, some of them at their end."""
    known = {voice: flow.voice(*parts) for voice, parts in tiny.voices().items()}
    made = []
    for n in sizes:
        # One without columns would have no mel.
        ahead, cut = rng.choice([(0, 0), (AHEAD, CHUNK)]) if n > AHEAD else (0, 0)
        voice = known[rng.choice([*known])]
        made.append(FlowInput(voice, tiny.random_codes(n, seed=n), ahead, cut))
    return made


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of the peak, the largest of all streams."""
    assert [mel.shape for mel in found] == [mel.shape for mel in expected]
    return max(
        float((mel - wanted).abs().max() / wanted.abs().max())
        for mel, wanted in zip(found, expected, strict=True)
    )


def test_a_padded_batch_on_tapes_equals_the_one_without(name):
    """Every batch after a longer or a shorter one, which leaves its columns in the buffers."""
    flow, rng = flow_of(name), random.Random(1)
    batches = [
        batch(flow, rng, sizes)
        for sizes in ([5], [60, 3, 20, 7, 31], [4, 40, 9, 8, 12], [90], [6], [70, 2, 5, 5, 61])
    ]
    expected = [flow.mels(inputs) for inputs in batches]
    graphs = flow.use_graphs(6, Captures())
    for inputs, wanted in zip(batches, expected, strict=True):
        assert error(flow.mels(inputs), wanted) < 1e-5
    assert graphs.counts == {"replays": 6, "fallbacks": 0, "failed_captures": 0}


def test_nothing_of_what_buffers_held_is_heard(name):
    flow, rng = flow_of(name), random.Random(2)
    inputs = batch(flow, rng, [33, 5, 64])
    expected = flow.mels(inputs)
    graphs = flow.use_graphs(4, Captures())
    flow.mels(batch(flow, rng, [30, 30, 60]))
    for tensor in graphs._memory.values():
        tensor.fill_(math.nan if tensor.is_floating_point() else 1)
    assert error(flow.mels(inputs), expected) < 1e-5


def test_a_stream_sounds_alike_in_every_padded_shape(name):
    flow, rng = flow_of(name), random.Random(3)
    [one] = batch(flow, rng, [20])
    [expected] = flow.mels([one])
    flow.use_graphs(4, Captures())
    for others in ([], [80], [3, 150], [40, 40, 40]):
        [found, *_] = flow.mels([one, *batch(flow, rng, others)])
        assert error([found], [expected]) < 1e-5


def test_a_shape_is_captured_when_it_first_comes_also_after_the_start(name):
    flow, rng, captures = flow_of(name), random.Random(4), Captures()
    graphs = flow.use_graphs(4, captures)
    flow.mels(batch(flow, rng, [5, 6]))
    assert captures.n == 2, "begin and step"
    graphs.freeze()
    flow.mels(batch(flow, rng, [8, 2]))
    assert captures.n == 2
    flow.mels(batch(flow, rng, [8, 2, 9]))
    assert captures.n == 4 and graphs.counts["replays"] == 3


def test_what_is_larger_runs_without_a_graph_and_is_counted(monkeypatch):
    flow, rng = flow_of("CosyVoice 2"), random.Random(5)
    monkeypatch.setattr(padding, "MOST_PAIRS", 10_000)
    monkeypatch.setattr(padding, "LONGEST_CODES", 128)
    large = [batch(flow, rng, sizes) for sizes in ([5] * 3, [70, 80], [150])]
    expected = [flow.mels(inputs) for inputs in large]
    graphs = flow.use_graphs(2, Captures())
    for inputs, wanted in zip(large, expected, strict=True):
        assert error(flow.mels(inputs), wanted) < 1e-6
    flow.mels(batch(flow, rng, [20]))
    assert graphs.counts == {"replays": 1, "fallbacks": 3, "failed_captures": 0}


def test_a_failed_capture_is_counted_and_not_tried_again():
    flow, rng = flow_of("CosyVoice 2"), random.Random(6)

    def fails(call):
        raise RuntimeError("out of memory")

    graphs = flow.use_graphs(2, fails)
    inputs = batch(flow, rng, [5])
    found = [flow.mels(inputs) for _ in range(2)]
    assert error(*found) == 0.0
    assert graphs.counts == {"replays": 0, "fallbacks": 2, "failed_captures": 1}


@pytest.mark.parametrize("most", [1, 5, 16, 40])
def test_padded_shapes_are_few_a_little_larger_and_within_the_bound(most):
    sizes = {padded_streams(n, most) for n in range(1, most + 1)}
    assert max(sizes) == most and len(sizes) <= 2 * most.bit_length()
    shapes = set()
    for n in range(1, most + 1):
        for longest in range(1, LONGEST_CODES + 1):
            shape = padded_shape(n, longest, most)
            if shape is None:
                assert padded_streams(n, most) * padded_codes(longest) ** 2 > MOST_PAIRS
                continue
            assert n <= shape[0] <= 1.5 * n
            assert longest <= shape[1] < max(longest + 32, 1.13 * longest)
            shapes.add(shape)
    assert len(shapes) <= 24 * len(sizes)
    assert padded_shape(most + 1, 10, most) is None
    assert padded_shape(1, LONGEST_CODES + 1, most) is None


def test_the_buffers_hold_every_shape():
    flow = flow_of("CosyVoice 3")
    graphs = flow.use_graphs(16, Captures())
    for n in range(1, 17):
        for longest in range(1, LONGEST_CODES + 1, 16):
            if shape := padded_shape(n, longest, 16):
                flow.batch(*shape, shape[1] + AHEAD, graphs._view)
    n_bytes = sum(tensor.nbytes for tensor in graphs._memory.values())
    # Of float32; what is added to scores takes most of it.
    assert n_bytes < 200 * 2**20


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.06), (torch.float16, 0.008)])
def test_in_half_precision_the_mel_differs_little(name, dtype, most):
    exact, half = flow_of(name), flow_of(name, dtype)
    sizes = [30, 71]
    expected = exact.mels(batch(exact, random.Random(1), sizes))
    found = half.mels(batch(half, random.Random(1), sizes))
    assert all(mel.dtype == torch.float32 for mel in found), "steps add up"
    assert 1e-5 < error(found, expected) < most


def test_graphs_in_half_precision_equal_the_batch_without():
    flow, rng = flow_of("CosyVoice 2", torch.bfloat16), random.Random(7)
    inputs = batch(flow, rng, [60, 3, 20])
    expected = flow.mels(inputs)
    flow.use_graphs(4, Captures())
    assert error(flow.mels(inputs), expected) < 0.02


def test_a_flow_that_looks_further_ahead_than_its_talker_knows_is_refused():
    module, _ = tiny.modules(3)
    tensors = dict(module.state_dict())
    name = "pre_lookahead_layer.conv1.weight"
    tensors[name] = torch.cat((tensors[name], tensors[name][..., :1]), 2)
    with pytest.raises(BadInputError, match="looks 4 codes ahead, not 3"):
        TokenFlow(tensors, torch.device("cpu"), torch.float32)


def reads_of(call: Callable[[], object]) -> set[str]:
    """Operators of a call that read a tensor on the host."""
    with torch.inference_mode(), torch.autograd.profiler.profile() as seen:
        call()
    return READS & {event.name for event in seen.function_events}


@pytest.mark.parametrize("version", [2, 3])
def test_hift_reads_nothing_on_the_host(version):
    """torch.istft does, so that no batch could be launched before the one before it ended."""
    _, module = tiny.modules(version)
    hift = hift_of(dict(module.state_dict()), torch.device("cpu"), torch.float32)
    [(_, state)] = hift.vocode([HiftState()], [torch.randn(80, 30)], [False])
    for is_end in (False, True):
        assert (
            reads_of(lambda end=is_end: hift.vocode([state], [torch.randn(80, 30)], [end])) == set()
        )
    spectrum = torch.randn(1, 9, 5, dtype=torch.complex64)
    assert reads_of(lambda: torch.istft(spectrum, 16, 4, window=torch.hann_window(16)))


def test_chunks_are_decoded_on_a_device_that_is_only_pretended():
    """CUDA's own capture, which no call may make wait; nor does HiFT."""
    paths = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-m", "test.unit.models.flow_on_fake_cuda"],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("decoded\n")
