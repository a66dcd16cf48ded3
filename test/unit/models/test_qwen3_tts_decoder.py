"""The streamed decoder of Qwen3-TTS's codec against its reference over the whole stream."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.models.qwen3_tts.decoder import CodecModule, StreamingCodecDecoder
from test.qwen3_tts import checkpoint as tiny
from test.qwen3_tts.reference import Codec, Reference

# Both are float32 and differ by rounding only.
TOLERANCE = 1e-5
N_FRAMES = 4 * tiny.CODEC["sliding_window"] + 3
# As published (Qwen3-TTS-Tokenizer-12Hz).
PUBLISHED = {
    "codebook_size": 2048,
    "codebook_dim": 512,
    "latent_dim": 1024,
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_quantizers": 16,
    "sliding_window": 72,
    "decoder_dim": 1536,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen3-tts"))


@pytest.fixture(scope="module")
def codec(checkpoint) -> Codec:
    return Reference(checkpoint).codec


@pytest.fixture(scope="module")
def decoder(checkpoint) -> StreamingCodecDecoder:
    return StreamingCodecDecoder.from_pretrained(checkpoint, "cpu", torch.float32)


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.CODES, (n_frames, tiny.GROUPS), generator=rng)


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    return random_codes(N_FRAMES)


@pytest.fixture(scope="module")
def whole(codec, codes) -> torch.Tensor:
    wave = codec.decode(codes)
    assert 0.05 < wave.square().mean().sqrt() < 0.5, "the case must not be trivial"
    assert (wave.abs() < 1).float().mean() > 0.9
    return wave


def streamed(decoder: StreamingCodecDecoder, codes: torch.Tensor, chunks: list[int]):
    stream, waves, at = decoder.new_stream(), [], 0
    while at < len(codes):
        n = chunks[len(waves) % len(chunks)]
        waves.append(decoder.decode([stream], codes[None, at : at + n])[0])
        at += n
    return torch.cat(waves)


@settings(derandomize=True, max_examples=8, deadline=None)
@given(chunks=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_any_chunking_gives_the_wave_of_the_reference(decoder, codes, whole, chunks):
    wave = streamed(decoder, codes, chunks)
    assert wave.shape == whole.shape == (N_FRAMES * 1920,)
    assert (wave - whole).abs().max() < TOLERANCE


def test_a_batch_gives_the_waves_of_its_streams_alone(decoder, codec):
    all_codes = [random_codes(9, seed) for seed in range(3)]
    streams = [decoder.new_stream() for _ in all_codes]
    parts = [
        decoder.decode(streams, torch.stack([codes[at : at + 3] for codes in all_codes]))
        for at in (0, 3, 6)
    ]
    for wave, codes in zip(torch.cat(parts, dim=1), all_codes, strict=True):
        assert (wave - codec.decode(codes)).abs().max() < TOLERANCE


def test_each_chunk_has_all_its_samples(decoder):
    assert decoder.samples_per_frame == decoder.samples_for(1) == 1920


def test_the_names_of_the_published_checkpoint_are_those_that_are_loaded():
    with torch.device("meta"):
        weights = CodecModule(PUBLISHED).state_dict()
    assert len(weights) == 271
    assert weights["pre_transformer.layers.7.self_attn.q_proj.weight"].shape == (1024, 512)
    assert weights["quantizer.rvq_rest.vq.layers.14._codebook.embedding_sum"].shape == (2048, 256)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(checkpoint, tmp_path):
    tiny.build(tmp_path)
    config = tmp_path / "speech_tokenizer" / "config.json"
    changed = {"decoder_config": tiny.CODEC | {"num_hidden_layers": 3}}
    config.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="decoder tensors missing"):
        StreamingCodecDecoder.from_pretrained(tmp_path, "cpu", torch.float32)
