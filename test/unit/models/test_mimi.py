"""Mimi frame by frame against transformers' Mimi over the whole."""

from pathlib import Path

import pytest
import torch
from test_code2wav_graphs import FakeCapture
from transformers import MimiConfig, MimiModel

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.mimi import EncoderStream, MimiDecoder, MimiEncoder, load_mimi
from test.mimi.tiny import (
    CONFIG,
    N_QUANTIZERS,
    SAMPLES_PER_FRAME,
    decoded,
    encoded,
    in_float64,
    random_codes,
    random_sound,
    save_checkpoint,
    tiny_module,
)

# Of the peak. In float64 what remains is the reference's rotary embedding, which is float32. In
# float32 the reference itself is 9e-7 away from its result in float64.
EXACT, ROUNDED = 1e-6, 3e-6
# 250 positions of the transformers are 125 frames.
N_FRAMES = 150
AGES = (0, 1, 2, 5, 40, 124, 126, 149)


@pytest.fixture(scope="module")
def module() -> MimiModel:
    return tiny_module()


@pytest.fixture(scope="module")
def checkpoint(module, tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("mimi"), module)


@pytest.fixture(scope="module")
def decoder(checkpoint) -> MimiDecoder:
    return MimiDecoder.from_pretrained(checkpoint, "cpu", torch.float32)


@pytest.fixture(scope="module")
def encoder(checkpoint) -> MimiEncoder:
    return MimiEncoder(load_mimi(checkpoint, CONFIG))


def error(wave: torch.Tensor, reference: torch.Tensor) -> float:
    """Of the peak of the reference, which may lie outside of the range of the decoder."""
    assert wave.shape == reference.shape
    assert 0.1 < reference.square().mean().sqrt() < 0.4, "the case must not be trivial"
    return float((wave - reference.clamp(-1, 1)).abs().max() / reference.abs().max())


def streamed(decoder: MimiDecoder, codes: torch.Tensor, n_chunk: int) -> torch.Tensor:
    stream = decoder.new_stream()
    return torch.cat([decoder.decode([stream], part[None])[0] for part in codes.split(n_chunk)])


@pytest.mark.parametrize("n_chunk", [1, 3, 4, 64])
def test_the_wave_in_chunks_is_that_of_the_whole_also_beyond_the_window(checkpoint, n_chunk):
    codes = random_codes(N_FRAMES)
    decoder = MimiDecoder.from_pretrained(checkpoint, "cpu", torch.float64)
    wave = streamed(decoder, codes, n_chunk)
    assert error(wave, decoded(in_float64(), codes)) < EXACT


@pytest.mark.parametrize("n_chunk", [1, 4])
def test_in_float32_the_wave_differs_by_rounding(decoder, module, n_chunk):
    codes = random_codes(N_FRAMES)
    assert error(streamed(decoder, codes, n_chunk), decoded(module, codes)) < ROUNDED


def test_the_window_matters_to_the_wave(module):
    """Without it, the claim about frames beyond it would be empty."""
    codes = random_codes(N_FRAMES)
    whole = decoded(module, codes)[140 * SAMPLES_PER_FRAME :]
    unbounded = tiny_module(sliding_window=10_000)
    late = decoded(unbounded, codes)[140 * SAMPLES_PER_FRAME :]
    assert (late - whole).abs().max() > 0.01


def test_streams_of_different_ages_share_a_batch_and_sound_as_alone(decoder, module):
    all_codes = [random_codes(age + 6, seed) for seed, age in enumerate(AGES)]
    streams = [decoder.new_stream() for _ in AGES]
    waves = [[] for _ in AGES]
    for stream, wave, codes, age in zip(streams, waves, all_codes, AGES, strict=True):
        if age:
            wave.append(decoder.decode([stream], codes[None, :age])[0])
    for at in range(0, 6, 2):
        old = [i for i, stream in enumerate(streams) if stream.n_frames]
        for batch in ([i for i in range(len(AGES)) if i not in old], old):
            if batch:
                chunk = [all_codes[i][AGES[i] + at : AGES[i] + at + 2] for i in batch]
                found = decoder.decode([streams[i] for i in batch], torch.stack(chunk))
                for i, part in zip(batch, found, strict=True):
                    waves[i].append(part)
    for wave, codes in zip(waves, all_codes, strict=True):
        assert error(torch.cat(wave), decoded(module, codes)) < ROUNDED


@pytest.mark.parametrize("n_chunk", [1, 4])
def test_the_codes_in_chunks_are_those_of_the_whole_also_beyond_the_window(
    encoder, module, n_chunk
):
    sound = random_sound(N_FRAMES)
    stream = encoder.new_stream()
    parts = sound.split(n_chunk * SAMPLES_PER_FRAME)
    codes = torch.cat([encoder.encode([stream], part[None])[0] for part in parts])
    assert codes.shape == (N_FRAMES, N_QUANTIZERS)
    assert torch.equal(codes, encoded(module, sound))
    assert len(codes.unique()) > 16, "the case must not be trivial"


def test_new_streams_and_old_ones_are_encoded_in_one_batch_as_alone(encoder, module):
    sounds = [random_sound(age + 4, seed) for seed, age in enumerate(AGES)]
    streams = [encoder.new_stream() for _ in AGES]
    codes = [[] for _ in AGES]
    for stream, found, sound, age in zip(streams, codes, sounds, AGES, strict=True):
        if age:
            found.append(encoder.encode([stream], sound[None, : age * SAMPLES_PER_FRAME])[0])
    for n in range(4):
        batch = []
        for sound, age in zip(sounds, AGES, strict=True):
            batch.append(sound[(age + n) * SAMPLES_PER_FRAME :][:SAMPLES_PER_FRAME])
        for found, frame in zip(codes, encoder.encode(streams, torch.stack(batch)), strict=True):
            found.append(frame)
    for found, sound in zip(codes, sounds, strict=True):
        assert torch.equal(torch.cat(found), encoded(module, sound))


def test_the_state_of_a_stream_stays_as_it_is(encoder, decoder):
    stream = encoder.new_stream()
    for _ in range(2):
        encoder.encode([stream], random_sound(130)[None])
    assert stream.kv.shape[2] == 249
    heard = decoder.new_stream()
    for _ in range(2):
        decoder.decode([heard], random_codes(130)[None])
    assert heard.kv.shape[2] == 249
    assert stream.kv.untyped_storage().nbytes() == stream.kv.nbytes


def test_graphs_decode_what_the_decoder_does_also_beyond_the_window(checkpoint, decoder):
    """Their buffers hold windows of positions, of which a frame has two."""
    graphed = MimiDecoder.from_pretrained(checkpoint, "cpu", torch.float32)
    graphed.use_graphs(4, FakeCapture())
    codes = torch.stack([random_codes(140, seed) for seed in range(3)])
    ours, theirs = ([d.new_stream() for _ in codes] for d in (graphed, decoder))
    for chunk in codes.split((4, 60, 64, 4, 4, 4), dim=1):
        expected = decoder.decode(theirs, chunk)
        torch.testing.assert_close(graphed.decode(ours, chunk), expected, atol=3e-6, rtol=0)
    assert graphed.graphs.counts["replays"] == 6


def test_bad_samples_are_refused(encoder):
    stream: EncoderStream = encoder.new_stream()
    with pytest.raises(ValueError, match="whole frames of 1920"):
        encoder.encode([stream], random_sound(1)[None, :-1])
    with pytest.raises(ValueError, match="whole frames"):
        encoder.encode([stream], random_sound(0)[None])
    with pytest.raises(ValueError, match="twice"):
        encoder.encode([stream, stream], random_sound(2).view(2, -1))
    assert not stream.is_begun


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "encodec"}, "'encodec', not mimi"),
        ({"use_causal_conv": False}, "use_causal_conv False"),
        ({"pad_mode": "reflect"}, "pad_mode reflect"),
        ({"upsampling_ratios": [8, 5, 4, 2]}, "positions of 40 ms"),
    ],
)
def test_a_mimi_that_cannot_be_streamed_is_refused(checkpoint, change, message):
    with pytest.raises(BadInputError, match=message):
        load_mimi(checkpoint, CONFIG | change)


def test_a_checkpoint_of_another_size_is_refused(checkpoint):
    with pytest.raises(ValueError, match="tensors missing"):
        load_mimi(checkpoint, CONFIG | {"num_hidden_layers": 3})


def test_the_published_checkpoint_has_the_names_that_are_loaded():
    with torch.device("meta"):
        weights = MimiModel(MimiConfig()).state_dict()
    book = "quantizer.acoustic_residual_vector_quantizer.layers.30.codebook.embed_sum"
    assert weights[book].shape == (2048, 256)
    assert weights["decoder.layers.0.conv.weight"].shape == (1024, 512, 7)
    assert weights["upsample.conv.weight"].shape == (512, 1, 4)
