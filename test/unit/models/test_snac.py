"""SNAC's decoder in chunks against the reference package's decode of the whole stream."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snac import SNAC

from sglang_live.errors import BadInputError
from sglang_live.messages import SoundPlace
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.snac import SnacDecoder, SnacStream
from sglang_live.stages.vocoder.batcher import VocoderChunk, VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig
from test.orpheus.tiny_snac import (
    CODEBOOK_SIZE,
    CONFIG,
    random_codes,
    save_checkpoint,
    tiny_module,
    whole_wave,
)

SAMPLES_PER_FRAME = 2048
# Both decodes are float32 and differ by rounding only.
TOLERANCE = 2e-5
# What a decode with four frames of context, as is usual, gets wrong somewhere in the wave.
AUDIBLE = 2e-3


def ending(decoder: SnacDecoder, codes: torch.Tensor) -> torch.Tensor:
    """The codes and their tail."""
    tail = torch.full((decoder.n_tail_frames, decoder.n_quantizers), END_CODE)
    return torch.cat((codes, tail))


def streamed_wave(decoder: SnacDecoder, codes: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """The same in chunks of the given frame counts; the last one is repeated."""
    stream, waves, start = decoder.new_stream(), [], 0
    codes = ending(decoder, codes)
    for n_frames in chunks + [chunks[-1]] * len(codes):
        if start >= len(codes):
            break
        waves += decoder.decode([stream], codes[None, start : start + n_frames])
        start += n_frames
    return torch.cat(waves)


def error(wave: torch.Tensor, reference: torch.Tensor) -> float:
    assert wave.shape == reference.shape
    return (wave - reference).abs().max().item()


def load(path: Path) -> SnacDecoder:
    return SnacDecoder.from_pretrained(path, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def module() -> SNAC:
    return tiny_module()


@pytest.fixture(scope="module")
def decoder(module, tmp_path_factory) -> SnacDecoder:
    return load(save_checkpoint(tmp_path_factory.mktemp("snac"), module))


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    return random_codes(17)


@pytest.fixture(scope="module")
def wave(module, codes) -> torch.Tensor:
    return whole_wave(module, codes)


def test_a_frame_is_seven_codes_and_85_ms(decoder):
    assert (decoder.n_quantizers, decoder.samples_per_frame) == (7, SAMPLES_PER_FRAME)
    assert (decoder.sample_rate_hz, decoder.n_tail_frames) == (24_000, 3)
    assert decoder._config.ahead_frames == 3, "as the talker knows it"


@settings(derandomize=True, max_examples=10, deadline=None)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_any_chunking_gives_the_wave_of_one_decode(decoder, codes, wave, chunks):
    assert error(streamed_wave(decoder, codes, chunks), wave) < TOLERANCE


@pytest.mark.parametrize("n_frames", [1, 2, 3, 4, 7])
def test_a_stream_of_any_length_is_complete(module, decoder, n_frames):
    codes = random_codes(n_frames, seed=n_frames)
    reference = whole_wave(module, codes)
    assert len(reference) == n_frames * SAMPLES_PER_FRAME
    for chunk in (1, 2, 4, 20):
        assert error(streamed_wave(decoder, codes, [chunk]), reference) < TOLERANCE


def test_a_window_of_four_frames_differs(module, codes, wave):
    windows = [whole_wave(module, codes[i : i + 4])[2048:4096] for i in range(len(codes) - 3)]
    assert error(torch.cat(windows), wave[2048 : 2048 * (len(codes) - 2)]) > AUDIBLE


def test_noise_and_every_layer_of_columns_matter(decoder, codes, wave):
    quiet = tiny_module()
    with torch.no_grad():
        for layers in list(quiet.decoder.model)[2:-3]:
            layers.block[2].linear.parametrizations.weight.original0.zero_()
    assert error(whole_wave(quiet, codes), wave) > AUDIBLE
    before, after = ending(decoder, codes)[:9], ending(decoder, codes)[9:]
    stream, offset = decoder.new_stream(), 0
    [begun] = decoder.decode([stream], before[None])
    for layer in decoder._layers:
        damaged = SnacStream(stream.columns.clone(), stream.n_frames)
        damaged.columns[offset : offset + layer.n_values] = 0
        offset += layer.n_values
        if layer.n_values:
            [rest] = decoder.decode([damaged], after[None])
            assert error(torch.cat((begun, rest)), wave) > 100 * TOLERANCE
    assert offset == len(stream.columns)


@settings(derandomize=True, max_examples=6, deadline=None)
@given(
    ages=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    rest=st.integers(1, 5),
    n_frames=st.integers(1, 6),
)
def test_streams_that_begin_go_on_and_end_share_a_batch(module, decoder, ages, rest, n_frames):
    """One after the other, each of the streams is the one that ends."""
    for ends in range(len(ages)):
        streams = [decoder.new_stream() for _ in ages]
        waves: list[list[torch.Tensor]] = [[] for _ in ages]
        all_codes, chunks = [], []
        for i, age in enumerate(ages):
            of_stream = random_codes(age + (rest if i == ends else 8), seed=i)
            all_codes.append(of_stream)
            padded = ending(decoder, of_stream)
            if age:
                waves[i] += decoder.decode([streams[i]], padded[None, :age])
            chunks.append(padded[age:])
        n = rest + decoder.n_tail_frames
        for at in range(0, n, n_frames):
            chunk = torch.stack([of_stream[at : min(n, at + n_frames)] for of_stream in chunks])
            for found, wave in zip(waves, decoder.decode(streams, chunk), strict=True):
                found.append(wave)
        for i, (found, of_stream) in enumerate(zip(waves, all_codes, strict=True)):
            reference, wave = whole_wave(module, of_stream), torch.cat(found)
            assert i != ends or len(wave) == len(reference)
            assert error(wave, reference[: len(wave)]) < TOLERANCE


def test_the_vocoder_loses_nothing(module, decoder):
    """The engine with its schedule of chunks; jobs come one after the other and share batches."""
    engine = VocoderEngine(decoder, VocoderConfig(max_streams=8, max_batch=4))
    engine.warm_up()
    all_codes = {str(n): random_codes(n, seed=n) for n in (1, 3, 6, 11)}
    pcm = dict.fromkeys(all_codes, b"")
    ended = set()

    def run() -> None:
        while chunks := engine.step():
            for chunk in chunks:
                pcm[chunk.job_id] += chunk.pcm
                if chunk.is_last:
                    ended.add(chunk.job_id)

    for job, codes in all_codes.items():
        engine.open(job)
        for at in range(0, len(codes), 2):
            engine.feed(job, codes[at : at + 2])
            run()
    for job, codes in all_codes.items():
        engine.end_utterance(job)
        engine.feed(job, codes[:2])
        engine.finish(job)
    run()
    assert ended == set(all_codes)
    for job, codes in all_codes.items():
        wave = torch.cat([whole_wave(module, codes), whole_wave(module, codes[:2])])
        expected = (wave * 32767).round().to(torch.int16)
        found = torch.frombuffer(bytearray(pcm[job]), dtype=torch.int16)
        assert len(found) == len(expected)
        assert (found.int() - expected.int()).abs().max() <= 1


def test_a_job_goes_on_where_another_vocoder_has_ended(decoder):
    utterances = [random_codes(n, seed=n) for n in (7, 4)]

    def decoded(sent: SoundPlace | None = None) -> list[VocoderChunk]:
        engine = VocoderEngine(decoder, VocoderConfig())
        engine.open("a", sent=sent)
        for codes in utterances[0 if sent is None else sent.utterance :]:
            engine.feed("a", codes)
            engine.end_utterance("a")
        engine.finish("a")
        chunks = []
        while new := engine.step():
            chunks += new
        return chunks

    chunks = decoded()
    whole = b"".join(chunk.pcm for chunk in chunks)
    assert len(whole) == 2 * 11 * SAMPLES_PER_FRAME
    assert any(chunk.place.n_done in (9, 8) for chunk in chunks), "inside of a tail"
    for n, chunk in enumerate(chunks):
        found = b"".join(c.pcm for c in [*chunks[: n + 1], *decoded(chunk.place)])
        assert len(found) == len(whole)
        apart = np.frombuffer(found, "<i2").astype(int) - np.frombuffer(whole, "<i2")
        assert np.abs(apart).max() <= 1


def test_equal_codes_sound_equal(decoder, codes):
    first, second = (streamed_wave(decoder, codes, [4]) for _ in range(2))
    assert torch.equal(first, second)


def test_a_stream_references_no_memory_of_its_batch(decoder, codes):
    streams = [decoder.new_stream() for _ in range(4)]
    decoder.decode(streams, torch.stack([codes[:3]] * 4))
    columns = streams[0].columns
    assert columns.untyped_storage().nbytes() == columns.nbytes


@pytest.mark.parametrize(
    "bad",
    [
        torch.full((1, 2, 7), CODEBOOK_SIZE),
        torch.full((1, 2, 7), -2),
        torch.zeros(1, 2, 6, dtype=torch.int64),
        torch.zeros(1, 2, 7),
    ],
    ids=["too large", "negative", "a code short", "float"],
)
def test_bad_codes_are_refused_and_change_nothing(decoder, codes, bad):
    stream = decoder.new_stream()
    decoder.decode([stream], codes[None, :3])
    columns = stream.columns.clone()
    with pytest.raises(BadInputError, match="codes must"):
        decoder.decode([stream], bad)
    assert stream.n_frames == 3
    assert torch.equal(stream.columns, columns)


def test_the_end_cannot_be_fed_to_a_job(decoder):
    engine = VocoderEngine(decoder, VocoderConfig())
    engine.open("a")
    with pytest.raises(BadInputError, match="codes must lie"):
        engine.feed("a", torch.full((1, 7), END_CODE))


def test_inconsistent_batches_are_refused(decoder, codes):
    stream = decoder.new_stream()
    two = torch.stack([codes[:1]] * 2)
    with pytest.raises(ValueError, match="twice"):
        decoder.decode([stream, stream], two)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode([stream], two)
    mixed = codes[None, :2].clone()
    mixed[0, 0] = END_CODE
    with pytest.raises(ValueError, match="END_CODE is not in every place"):
        decoder.decode([stream], mixed)
    decoder.decode([stream], torch.full((1, 1, 7), END_CODE))
    with pytest.raises(ValueError, match="behind its end"):
        decoder.decode([stream], codes[None, :1])


def test_a_snac_without_noise_loads_with_the_older_names_of_its_weights(tmp_path, codes):
    module = tiny_module(noise=False)
    norm = ".parametrizations.weight.original"
    renamed = {
        name.replace(f"{norm}0", ".weight_g").replace(f"{norm}1", ".weight_v"): weight
        for name, weight in module.state_dict().items()
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"noise": False}))
    torch.save(renamed, tmp_path / "pytorch_model.bin")
    wave = streamed_wave(load(tmp_path), codes, [2, 5])
    assert error(wave, whole_wave(module, codes)) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_window_size": 32}, "without attention"),
        ({"depthwise": False}, "depthwise"),
        ({"vq_strides": None}, "lacks 'vq_strides'"),
    ],
    ids=["attention", "dense", "no codec"],
)
def test_another_kind_of_snac_is_refused(tmp_path, module, changes, message):
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None or k != "vq_strides"}
    with pytest.raises(BadInputError, match=message):
        load(save_checkpoint(tmp_path, module, config))


def test_a_checkpoint_without_weights_is_refused(tmp_path, module):
    save_checkpoint(tmp_path, module, **{"decoder.model.7.bias": None})
    with pytest.raises(BadInputError, match=r"lack decoder\.model\.7\.bias"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no tensors")
    with pytest.raises(BadInputError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(BadInputError, match=r"has no pytorch_model\.bin"):
        load(tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_agrees_with_the_cpu(tmp_path, module, codes, wave):
    path = save_checkpoint(tmp_path, module)
    decoder = SnacDecoder.from_pretrained(path, torch.device("cuda"), torch.float32)
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        found = streamed_wave(decoder, codes, [2, 4]).cpu()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert error(found, wave) < 1e-4
