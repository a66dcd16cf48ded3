"""Chatterbox's decoder, and Turbo's, against their reference on tiny weights."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.decoder import ChatterboxDecoder
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.flow.mels import FlowInput
from test.flow import checkpoint as tiny

TAIL = torch.full((1, 1), END_CODE)


@pytest.fixture(scope="module", params=[False, True], ids=["Chatterbox", "Turbo"])
def is_mean(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, is_mean) -> Path:
    path = tmp_path_factory.mktemp("chatterbox")
    tiny.save_s3gen(path, is_mean)
    return path


@pytest.fixture(scope="module")
def exact(path) -> ChatterboxDecoder:
    """In float64, where the phases of a source of some seconds are exact."""
    return ChatterboxDecoder.from_pretrained(path, "cpu", torch.float64)


def reference(
    is_mean: bool, voice: str, codes: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    known, *others = tiny.s3gen_voices()[voice]
    module = tiny.s3gen(is_mean).to(dtype)
    try:
        return module(codes, (known, *(part.to(dtype) for part in others)))
    finally:
        module.float()


def test_the_mel_of_a_piece_equals_the_references_in_a_batch(path, is_mean):
    decoder = ChatterboxDecoder.from_pretrained(path, "cpu", torch.float32)
    pieces = [("default", 30), ("ben", 3), ("ben", 71)]
    given, expected = [], []
    for voice, n in pieces:
        codes = tiny.random_codes(n, seed=n)
        stream = decoder.new_stream(voice)
        given.append(decoder._input(stream, codes, is_end=True))
        expected.append(reference(is_mean, voice, codes, torch.float32)[0])
    assert isinstance(given[0], FlowInput)
    for found, mel in zip(decoder._flow.mels(given), expected, strict=True):
        assert found.shape == mel.shape
        assert (found - mel).abs().max() < 1e-5 * mel.abs().max()


def test_pieces_of_many_streams_sound_as_alone_in_the_reference(exact, is_mean):
    rng = random.Random(1)
    said = [(rng.choice(exact.voices), tiny.random_codes(n, seed=n)) for n in (2, 25, 26, 50, 50)]
    streams = [exact.new_stream(voice) for voice, _ in said]
    left = [[*codes[:, None].split(25), TAIL] for _, codes in said]
    found: list[Tensor] = [torch.empty(0)] * len(said)
    while some := [i for i, chunks in enumerate(left) if chunks]:
        rows = rng.sample(some, rng.randint(1, len(some)))
        chunks = [left[i].pop(0) for i in rows]
        waves = exact.decode([streams[i] for i in rows], chunks)
        for i, chunk, wave in zip(rows, chunks, waves, strict=True):
            is_end = bool(chunk[-1] == END_CODE)
            assert bool(len(wave)) == is_end, "only the whole piece has an exact sound"
            found[i] = wave
    for (voice, codes), wave in zip(said, found, strict=True):
        expected = reference(is_mean, voice, codes, torch.float64)[1]
        assert expected.std() > 0.02
        assert wave.shape == expected.shape and not wave[:480].any()
        # Weights are put together in float32, and turns of the source add up by sample.
        assert (wave - expected).abs().max() < 1e-4


def test_what_is_missing_or_no_voice_is_refused(path, is_mean, tmp_path):
    def load() -> None:
        ChatterboxDecoder.from_pretrained(tmp_path, "cpu", torch.float32)

    with pytest.raises(BadInputError, match=r"cannot read .*s3gen\.safetensors"):
        load()
    [weights] = path.glob("*.safetensors")
    (tmp_path / weights.name).symlink_to(weights)
    with pytest.raises(
        BadInputError, match=r"has no voice: conds.pt is missing, and voices/NAME.pt"
    ):
        load()
    torch.save({"t3": {}}, tmp_path / "conds.pt")
    with pytest.raises(BadInputError, match=r"conds\.pt is no voice of Chatterbox: it lacks 'gen'"):
        load()
    known = torch.load(path / "conds.pt", weights_only=True)
    known["gen"]["prompt_feat"] = known["gen"]["prompt_feat"][:, :-1]
    torch.save(known, tmp_path / "conds.pt")
    with pytest.raises(BadInputError, match="10 codes do not fit 19 columns"):
        load()
