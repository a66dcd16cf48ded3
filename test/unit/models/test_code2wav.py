"""The streamed vocoder against transformers' own decode of the whole stream."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from sglang_live.errors import BadInputError
from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav
from sglang_live.models.speech_lm.frame_decoder import FrameStream

WINDOW_FRAMES = 8
CODEBOOK_SIZE = 64
N_QUANTIZERS = 16
# Both decodes are float32 and differ by rounding only: each is within 1e-6 of float64.
TOLERANCE = 1e-5
# What a decode that forgets its left context gets wrong, at least, somewhere in the wave.
AUDIBLE = 0.05


def tiny_module(**overrides) -> Qwen3OmniMoeCode2Wav:
    """A random vocoder in which every path matters; its wave has an rms of 0.15."""
    config = dict(
        codebook_size=CODEBOOK_SIZE,
        num_quantizers=N_QUANTIZERS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=WINDOW_FRAMES,
        decoder_dim=32,
        upsample_rates=[8, 5, 4, 3],
        upsampling_ratios=[2, 2],
    )
    module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config | overrides)).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embedding" in name:
                weight.normal_(0, N_QUANTIZERS**0.5, generator=rng)  # the model takes a mean
            elif weight.ndim > 1:
                gain = 0.7 if name.startswith("decoder") else 1.0
                weight.normal_(0, gain * weight[0].numel() ** -0.5, generator=rng)
            elif name.endswith(("gamma", "scale", "norm.weight")):
                weight.uniform_(0.3, 1.2, generator=rng)
            else:
                weight.normal_(0, 0.1, generator=rng)
        last = module.decoder[-1].conv
        last.bias.zero_()
        last.weight.mul_(1e-3)
        last.weight.mul_(0.15 / whole_wave(module, random_codes(30)).std())
    return module


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    """Return [n_frames, n_quantizers] int64."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODEBOOK_SIZE, (n_frames, N_QUANTIZERS), generator=rng)


@torch.inference_mode()
def whole_wave(module: Qwen3OmniMoeCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """Decode [n_frames, n_quantizers] at once with transformers. Returns [n_samples]."""
    return module(codes.T[None])[0, 0]


def streamed_wave(decoder: StreamingCode2Wav, codes: torch.Tensor, chunks: list[int]):
    """Decode the same in chunks of the given frame counts; the last one is repeated."""
    stream, waves, start = decoder.new_stream(), [], 0
    chunks = chunks + [chunks[-1]] * len(codes)
    for n_frames in chunks:
        if start >= len(codes):
            break
        waves.append(decoder.decode([stream], codes[None, start : start + n_frames])[0])
        start += n_frames
    return torch.cat(waves)


def error(wave: torch.Tensor, reference: torch.Tensor) -> float:
    assert wave.shape == reference.shape
    return (wave - reference).abs().max().item()


@pytest.fixture(scope="module")
def module() -> Qwen3OmniMoeCode2Wav:
    return tiny_module()


@pytest.fixture(scope="module")
def decoder(module) -> StreamingCode2Wav:
    return StreamingCode2Wav(module)


@pytest.fixture(scope="module")
def long_codes() -> torch.Tensor:
    return random_codes(4 * WINDOW_FRAMES + 3)


@pytest.fixture(scope="module")
def long_wave(module, long_codes) -> torch.Tensor:
    return whole_wave(module, long_codes)


@settings(derandomize=True, max_examples=20)
@given(chunks=st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_any_chunking_gives_the_wave_of_one_decode(decoder, long_codes, long_wave, chunks):
    assert error(streamed_wave(decoder, long_codes, chunks), long_wave) < TOLERANCE


@pytest.mark.parametrize("n_frames", [1, 2, 4, 100])
def test_equal_chunks_give_the_wave_of_one_decode(decoder, long_codes, long_wave, n_frames):
    assert error(streamed_wave(decoder, long_codes, [n_frames]), long_wave) < TOLERANCE


def test_the_production_window_slides_without_a_seam():
    module = tiny_module(sliding_window=72)
    codes = random_codes(3 * 72 + 10)
    wave = streamed_wave(StreamingCode2Wav(module), codes, [2, 7])
    assert error(wave, whole_wave(module, codes)) < TOLERANCE


@pytest.mark.parametrize(
    "overrides",
    [
        dict(num_attention_heads=4, num_key_value_heads=2),
        dict(attention_bias=True),
        dict(sliding_window=1),
        dict(upsampling_ratios=[2], upsample_rates=[5, 2]),
    ],
    ids=str,
)
def test_other_configs_stream_as_exactly(overrides):
    module = tiny_module(**overrides)
    codes = random_codes(20)
    decoder = StreamingCode2Wav(module)
    assert error(streamed_wave(decoder, codes, [1, 3]), whole_wave(module, codes)) < TOLERANCE


def test_a_decode_without_any_part_of_its_state_differs(decoder, long_codes, long_wave):
    def forget_attention(stream: FrameStream) -> None:
        stream.kv = stream.kv[:, :, :0]

    def forget_columns(stream: FrameStream) -> None:
        stream.columns = torch.zeros_like(stream.columns)

    def forget_oldest_frame(stream: FrameStream) -> None:
        stream.kv = stream.kv[:, :, 1:]

    for forget in (forget_attention, forget_columns, forget_oldest_frame):
        stream, waves = decoder.new_stream(), []
        for chunk in long_codes.split(4):
            waves.append(decoder.decode([stream], chunk[None])[0])
            forget(stream)
        assert error(torch.cat(waves), long_wave) > AUDIBLE


def test_every_layer_of_columns_matters(decoder, long_codes, long_wave):
    stream = decoder.new_stream()
    before, after = long_codes[:20], long_codes[20:]
    decoder.decode([stream], before[None])
    rest = long_wave[decoder.samples_for(20) :]
    offset = 0
    for layer in decoder._layers:
        damaged = FrameStream(stream.kv, stream.columns.clone(), stream.n_frames)
        damaged.columns[offset : offset + layer.n_values] = 0
        offset += layer.n_values
        if layer.n_values:
            assert error(decoder.decode([damaged], after[None])[0], rest) > 100 * TOLERANCE


@pytest.mark.parametrize("n_frames", [1, 2, 3, 9])
def test_the_sample_count_is_that_of_transformers(module, decoder, n_frames):
    n_samples = len(whole_wave(module, random_codes(n_frames)))
    assert decoder.samples_for(n_frames) == n_samples == 1920 * n_frames - 555


def test_every_later_frame_adds_exactly_80_ms(decoder):
    assert decoder.samples_for(0) == 0
    assert decoder.samples_per_frame / decoder.sample_rate_hz == 0.08
    stream = decoder.new_stream()
    counts = [decoder.decode([stream], random_codes(n)[None]).shape[1] for n in (1, 1, 5)]
    assert counts == [decoder.samples_for(1), 1920, 5 * 1920]


@settings(derandomize=True, max_examples=10)
@given(ages=st.lists(st.integers(1, 20), min_size=2, max_size=4), n_frames=st.integers(1, 9))
def test_streams_of_different_ages_share_a_batch(module, decoder, ages, n_frames):
    codes = [random_codes(age + n_frames, seed=i) for i, age in enumerate(ages)]
    streams = [decoder.new_stream() for _ in ages]
    for stream, age, its_codes in zip(streams, ages, codes, strict=True):
        decoder.decode([stream], its_codes[None, :age])
    chunk = torch.stack([its_codes[-n_frames:] for its_codes in codes])
    waves = decoder.decode(streams, chunk)
    for wave, its_codes in zip(waves, codes, strict=True):
        expected = whole_wave(module, its_codes)[-n_frames * 1920 :]
        assert error(wave, expected) < TOLERANCE


def test_new_streams_share_a_batch(module, decoder):
    codes = torch.stack([random_codes(3, seed) for seed in range(3)])
    waves = decoder.decode([decoder.new_stream() for _ in codes], codes)
    for wave, its_codes in zip(waves, codes, strict=True):
        assert error(wave, whole_wave(module, its_codes)) < TOLERANCE


def test_a_stream_references_no_memory_of_its_batch(decoder):
    streams = [decoder.new_stream() for _ in range(4)]
    decoder.decode(streams, torch.stack([random_codes(3)] * 4))
    for tensor in (streams[0].kv, streams[0].columns):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_stream_stays_bounded(decoder):
    stream = decoder.new_stream()
    for _ in range(5):
        decoder.decode([stream], random_codes(6)[None])
    assert stream.n_frames == 30
    assert stream.kv.shape[2] == WINDOW_FRAMES - 1


@pytest.mark.parametrize(
    "codes",
    [
        torch.full((1, 2, N_QUANTIZERS), CODEBOOK_SIZE),
        torch.full((1, 2, N_QUANTIZERS), -1),
        torch.zeros(1, 2, N_QUANTIZERS - 1, dtype=torch.int64),
        torch.zeros(1, 2, N_QUANTIZERS),
    ],
    ids=["too large", "negative", "a quantizer short", "float"],
)
def test_bad_codes_are_refused_and_change_nothing(decoder, codes):
    stream = decoder.new_stream()
    decoder.decode([stream], random_codes(3)[None])
    kv, columns = stream.kv.clone(), stream.columns.clone()
    with pytest.raises(BadInputError, match="codes must"):
        decoder.decode([stream], codes)
    assert stream.n_frames == 3
    assert torch.equal(stream.kv, kv)
    assert torch.equal(stream.columns, columns)


def test_inconsistent_batches_are_refused(decoder):
    new, old = decoder.new_stream(), decoder.new_stream()
    decoder.decode([old], random_codes(1)[None])
    two = torch.stack([random_codes(1)] * 2)
    with pytest.raises(ValueError, match="first chunks and later"):
        decoder.decode([new, old], two)
    with pytest.raises(ValueError, match="twice"):
        decoder.decode([old, old], two)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode([old], two)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode([old], two[:1, :0])


def test_bfloat16_sounds_like_float32(module, long_codes, long_wave):
    decoder = StreamingCode2Wav(module, dtype=torch.bfloat16)
    wave = streamed_wave(decoder, long_codes, [2, 4])
    assert wave.dtype == torch.float32
    assert (wave - long_wave).square().mean() < 0.01 * long_wave.square().mean()


def test_strides_that_mute_the_first_frame_are_refused():
    with pytest.raises(ValueError, match="first frame emits nothing"):
        StreamingCode2Wav(tiny_module(upsampling_ratios=[]))


def test_a_half_precision_module_is_refused(module):
    with pytest.raises(ValueError, match="float32 module"):
        StreamingCode2Wav(tiny_module().to(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_agrees_with_the_cpu(module, long_codes, long_wave):
    decoder = StreamingCode2Wav(module, device="cuda")
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        wave = streamed_wave(decoder, long_codes, [2, 4]).cpu()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert error(wave, long_wave) < 1e-4


def save_checkpoint(path: Path, module: Qwen3OmniMoeCode2Wav, n_shards: int = 1, **changes):
    """Save module as the vocoder of a checkpoint that has another part, too.

    A change of None removes a tensor, any other adds or replaces it.
    """
    config = {"model_type": "qwen3_omni_moe", "code2wav_config": module.config.to_dict()}
    (path / "config.json").write_text(json.dumps(config))
    tensors = {f"code2wav.{name}": weight for name, weight in module.state_dict().items()}
    tensors |= {"talker.codec_head.weight": torch.zeros(2, 2)} | changes
    tensors = {name: weight for name, weight in tensors.items() if weight is not None}
    if n_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map = {name: f"part-{i % n_shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: weight for name, weight in tensors.items() if weight_map[name] == file}
        save_file(part, path / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def load(path: Path) -> StreamingCode2Wav:
    return StreamingCode2Wav.from_pretrained(path, "cpu", torch.float32)


@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_checkpoint_loads_with_one_file_or_several(tmp_path, module, long_wave, n_shards):
    save_checkpoint(tmp_path, module, n_shards)
    codes = random_codes(4 * WINDOW_FRAMES + 3)
    assert error(streamed_wave(load(tmp_path), codes, [5]), long_wave) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code2wav.decoder.0.conv.bias": None}, "1 code2wav tensors missing"),
        ({"code2wav.decoder.0.conv.extra": torch.zeros(1)}, "1 unexpected"),
        ({"code2wav.decoder.0.conv.bias": torch.zeros(3)}, r"config has \(32,\)"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_a_checkpoint_with_other_tensors_is_refused(tmp_path, module, changes, message):
    save_checkpoint(tmp_path, module, **changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_checkpoint_without_a_vocoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no code2wav_config"):
        load(tmp_path)
