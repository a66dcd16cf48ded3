"""The vocoder's static buffers and buckets, with captures that run the call again."""

import pytest
import torch
from test_code2wav import TOLERANCE, random_codes, tiny_module

from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav
from sglang_live.models.speech_lm.frame_decoder import sizes_up_to


class FakeCapture:
    """A replay computes again from the buffers, into the outputs of the capture."""

    def __init__(self, fails: bool = False):
        self.fails = fails
        self.n_captures = 0

    def __call__(self, call):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.n_captures += 1
        outputs = call()

        def replay():
            again = call()
            outputs.wave.copy_(again.wave)
            outputs.fresh_kv.copy_(again.fresh_kv)
            outputs.columns.copy_(again.columns)
            return outputs

        return replay


@pytest.fixture(scope="module")
def module():
    return tiny_module()


def decoders(module, capture: FakeCapture, max_streams: int = 4):
    eager, graphed = StreamingCode2Wav(module), StreamingCode2Wav(module)
    graphed.use_graphs(max_streams, capture)
    return eager, graphed


@pytest.mark.parametrize(("n", "sizes"), [(1, (1,)), (4, (1, 2, 4)), (6, (1, 2, 4, 6))])
def test_captured_sizes_end_with_the_largest_batch(n, sizes):
    assert sizes_up_to(n) == sizes


@pytest.mark.parametrize("n_streams", [1, 3])
def test_graphs_decode_what_the_decoder_does(module, n_streams):
    eager, graphed = decoders(module, FakeCapture())
    codes = random_codes(n_streams * 13).reshape(n_streams, 13, -1)
    ours, theirs = ([d.new_stream() for _ in codes] for d in (graphed, eager))
    start = 0
    for n_frames in (2, 2, 4, 4, 1):  # beyond the window
        chunk = codes[:, start : start + n_frames]
        start += n_frames
        expected = eager.decode(theirs, chunk)
        torch.testing.assert_close(graphed.decode(ours, chunk), expected, atol=TOLERANCE, rtol=0)
    assert graphed.graphs.counts == {"replays": 5, "fallbacks": 0, "failed_captures": 0}


def test_streams_of_different_ages_share_a_graph(module):
    eager, graphed = decoders(module, FakeCapture())
    codes = random_codes(3 * 12).reshape(3, 12, -1)
    pairs = [(graphed.new_stream(), eager.new_stream()) for _ in codes]
    for (ours, theirs), row, age in zip(pairs, codes, (2, 4, 8), strict=True):
        graphed.decode([ours], row[None, :age])
        eager.decode([theirs], row[None, :age])
    ours, theirs = map(list, zip(*pairs, strict=True))
    for start in (8, 10):
        chunk = codes[:, start : start + 2]
        expected = eager.decode(theirs, chunk)
        torch.testing.assert_close(graphed.decode(ours, chunk), expected, atol=TOLERANCE, rtol=0)


def test_a_shape_is_captured_once_and_batches_share_the_next_size(module):
    capture = FakeCapture()
    _, graphed = decoders(module, capture)
    for n_streams in (3, 4, 3):
        streams = [graphed.new_stream() for _ in range(n_streams)]
        graphed.decode(streams, random_codes(2 * n_streams).reshape(n_streams, 2, -1))
    assert capture.n_captures == 1


def test_after_the_start_a_new_shape_runs_without_a_graph_and_is_counted(module):
    capture = FakeCapture()
    eager, graphed = decoders(module, capture)
    graphed.graphs.freeze()
    codes = random_codes(2)[None]
    found = graphed.decode([graphed.new_stream()], codes)
    assert torch.equal(found, eager.decode([eager.new_stream()], codes))
    assert (capture.n_captures, graphed.graphs.counts["fallbacks"]) == (0, 1)


def test_a_batch_above_the_largest_size_runs_without_a_graph(module):
    _, graphed = decoders(module, FakeCapture(), max_streams=2)
    streams = [graphed.new_stream() for _ in range(3)]
    graphed.decode(streams, random_codes(6).reshape(3, 2, -1))
    assert graphed.graphs.counts == {"replays": 0, "fallbacks": 1, "failed_captures": 0}


def test_a_failed_capture_is_counted_and_not_tried_again(module):
    _, graphed = decoders(module, FakeCapture(fails=True))
    stream = graphed.new_stream()
    for _ in range(3):
        assert graphed.decode([stream], random_codes(2)[None]).shape[0] == 1
    # A first chunk and a later one are two shapes.
    assert graphed.graphs.counts == {"replays": 0, "fallbacks": 3, "failed_captures": 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_decode_what_the_decoder_does(module):
    eager = StreamingCode2Wav(module, device="cuda")
    graphed = StreamingCode2Wav(module, device="cuda")
    graphed.use_graphs(4)
    codes = random_codes(3 * 12).reshape(3, 12, -1)
    ours, theirs = ([d.new_stream() for _ in codes] for d in (graphed, eager))
    for start in range(0, 12, 2):
        chunk = codes[:, start : start + 2]
        expected = eager.decode(theirs, chunk)
        torch.testing.assert_close(graphed.decode(ours, chunk), expected, atol=1e-3, rtol=0)
    assert graphed.graphs.counts["failed_captures"] == 0
