"""Claims about a flow's graphs, as a program: the fake device is one of a whole process."""

import sys
import tempfile
from pathlib import Path

import torch

from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.hift import HiftState
from sglang_live.models.cosyvoice.decoder import CosyVoiceDecoder
from test.flow import checkpoint as tiny

VOICES = ("ada", "ben", "eve")
TAIL = torch.full((1, 1), END_CODE)


def chunks_equal_those_of_the_host(path: Path) -> None:
    host = CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32)
    device = CosyVoiceDecoder.from_pretrained(path, "cuda", torch.float32)
    graphs = device.use_graphs(4)
    pairs = [(host.new_stream(voice), device.new_stream(voice)) for voice in VOICES]
    ours, theirs = map(list, zip(*pairs, strict=True))
    codes = [tiny.random_codes(stream.rule.first + 3, seed=1)[:, None] for stream in ours]
    firsts = [said[: stream.rule.first] for said, stream in zip(codes, ours, strict=True)]
    rests = [said[len(first) :] for said, first in zip(codes, firsts, strict=True)]
    for chunks in (firsts, [torch.cat((rest, TAIL)) for rest in rests]):
        expected, found = host.decode(ours, chunks), device.decode(theirs, chunks)
        for wave, wanted in zip(found, expected, strict=True):
            assert wave.is_cuda and wave.shape == wanted.shape and len(wave)
            assert torch.isfinite(wave.cpu()).all()
    assert graphs.counts == {"replays": 2, "fallbacks": 0, "failed_captures": 0}, graphs.counts
    # Columns of mel, which are exact, as those of a source of some seconds in float32 are not.
    given = [device._input(stream, stream.codes, is_end=True) for stream in theirs]
    wanted = [host._input(stream, stream.codes, is_end=True) for stream in ours]
    for mel, other in zip(device._flow.mels(given), host._flow.mels(wanted), strict=True):
        assert (mel.cpu() - other).abs().max() < 1e-5 * other.abs().max()


def hift_does_not_wait(path: Path) -> None:
    """While a graph is captured, the fake device refuses what would wait."""
    decoder = CosyVoiceDecoder.from_pretrained(path, "cuda", torch.float32)
    mel = torch.randn(80, 30).to("cuda")
    state = HiftState()
    for is_end in (False, True):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            [(wave, state)] = decoder._hift.vocode([state], [mel], [is_end])
        assert len(wave)


@torch.inference_mode()
def main() -> None:
    for version in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            tiny.save(Path(folder), version)
            chunks_equal_those_of_the_host(Path(folder))
            hift_does_not_wait(Path(folder))
    print("decoded")


if __name__ == "__main__":
    sys.exit(main())
