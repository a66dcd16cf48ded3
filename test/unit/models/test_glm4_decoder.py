"""GLM-4-Voice's decoder against the published demo, which makes one response alone, on tiny
weights."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soxr
import torch
from torch import Tensor

from sglang_live.clock import SimClock
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.glm4_voice.decoder import GlmDecoder
from sglang_live.models.glm4_voice.family import DECODER, DECODER_FILES, VOICE
from sglang_live.models.glm4_voice.flow import SpokenCodes, n_columns
from sglang_live.stages.vocoder.batcher import VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.decoders import VoiceDecoder
from test.glm4_voice import decoder as tiny

TAIL = torch.full((1, 1), END_CODE)
# Of one short block, of exactly one, with an end at once behind it, and of three.
LENGTHS = 7, 25, 26, 80


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("glm")
    tiny.save(path / DECODER)
    return path


@pytest.fixture(scope="module")
def decoder(path) -> GlmDecoder:
    return GlmDecoder.from_pretrained(path, "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact(path) -> GlmDecoder:
    """In float64, where the phases of a source of some seconds are exact."""
    return GlmDecoder.from_pretrained(path, "cpu", torch.float64)


def codes_of(n: int) -> list[int]:
    return torch.randint(0, tiny.N_CODES, (n,), generator=torch.manual_seed(n)).tolist()


@cache
def demo(n: int, dtype: torch.dtype) -> tiny.Demo:
    return tiny.demo(codes_of(n), dtype)


def blocks_of(decoder: GlmDecoder, codes: list[int]) -> list[Tensor]:
    """[n, 1] each, as the engine cuts them by the stream's rule."""
    rule, blocks, rest = decoder.new_stream(VOICE).rule, [], torch.tensor(codes)[:, None]
    while len(rest) >= (n := rule.frames(len(blocks))):
        blocks.append(rest[:n])
        rest = rest[n:]
    return [*blocks, torch.cat((rest, TAIL))]


def said_by(decoder: GlmDecoder, codes: list[int]) -> list[Tensor]:
    stream = decoder.new_stream(VOICE)
    return [decoder.decode([stream], [block])[0] for block in blocks_of(decoder, codes)]


def heard(waves: list[Tensor]) -> np.ndarray:
    """What a listener hears of the demo's sound."""
    resampler = soxr.ResampleStream(tiny.RATE_HZ, OUTPUT_RATE_HZ, 1)
    return np.concatenate(
        [resampler.resample_chunk(wave.float().numpy(), last=wave is waves[-1]) for wave in waves]
    ).clip(-1.0, 1.0)


def test_blocks_have_the_demos_sizes(decoder):
    sizes = [len(block) for block in blocks_of(decoder, codes_of(730))]
    assert sizes == [25 + 1, 50, 100, 150, 200, 200, 730 - 725 - 1 + 1]


def test_there_are_as_many_columns_as_in_the_reference():
    n = torch.arange(3392, dtype=torch.int32)
    wanted = (n / 12.5 * 22050 / 256).int().tolist()
    assert [n_columns(i) for i in range(3392)] == wanted


@pytest.mark.parametrize("n", LENGTHS)
def test_the_mel_of_every_block_equals_the_demos_call(decoder, n):
    calls = demo(n, torch.float32).calls
    assert len(calls) == len([end for end in (0, 25, 75) if end < n])
    for codes, before, prompt, mel in calls:
        [found] = decoder._flow.mels([SpokenCodes(torch.cat((before, codes)), prompt)])
        assert found.shape == mel.shape
        assert (found - mel).abs().max() < 1e-5 * mel.abs().max()


def test_blocks_of_all_ages_are_one_batch(decoder):
    calls = [call for n in LENGTHS for call in demo(n, torch.float32).calls]
    given = [SpokenCodes(torch.cat((before, codes)), prompt) for codes, before, prompt, _ in calls]
    assert len({len(each.codes) for each in given}) < len(given)
    for found, (*_, mel) in zip(decoder._flow.mels(given), calls, strict=True):
        assert (found - mel).abs().max() < 1e-5 * mel.abs().max()


def test_codes_and_the_mel_before_them_are_heard(decoder):
    """Else equality with the demo would say little."""
    codes, before, prompt, mel = demo(26, torch.float32).calls[1]
    changed = codes.clone()
    changed[-1] = (changed[-1] + 1) % tiny.N_CODES
    others = decoder._flow.mels(
        [
            SpokenCodes(torch.cat((before, changed)), prompt),
            SpokenCodes(torch.cat((before, codes)), 0.5 * prompt),
            SpokenCodes(torch.cat((before.flip(0), codes)), prompt),
        ]
    )
    for found in others:
        assert (found - mel).abs().max() > 1e-2 * mel.abs().max()


@pytest.mark.parametrize("n", LENGTHS)
def test_a_stream_carries_the_demos_mel_and_sounds_as_it(exact, n):
    made = demo(n, torch.float64)
    assert torch.cat(made.waves).std() > 0.03
    stream = exact.new_stream(VOICE)
    found, carried = [], []
    for block in blocks_of(exact, codes_of(n)):
        carried.append(stream.mel)
        found.append(exact.decode([stream], [block])[0].numpy())
    for mel, (_, _, prompt, _) in zip(carried, made.calls, strict=True):
        assert mel.shape == prompt.shape
        assert not mel.numel() or (mel - prompt).abs().max() < 1e-9 * prompt.abs().max()
    wanted = heard(made.waves)
    assert np.abs(np.concatenate(found) - wanted).max() < 1e-5
    # A column less in each block behind the second.
    n_lost = max(0, len(made.calls) - 2)
    n_samples = (n_columns(n) - n_lost) * 256
    assert len(wanted) == pytest.approx(n_samples * OUTPUT_RATE_HZ / tiny.RATE_HZ, abs=1)


def test_a_last_block_with_fewer_columns_than_are_faded_over_is_heard(decoder):
    """The demo fails there: each block behind the second begins a column later."""
    stream = decoder.new_stream(VOICE)
    known = n_columns(77) - 30
    stream.codes, stream.mel = torch.tensor(codes_of(76)), torch.zeros(tiny.N_MELS, known)
    stream.overlap = torch.zeros(tiny.N_MELS, 34)
    [wave] = decoder.decode([stream], [torch.tensor([[5], [END_CODE]])])
    assert len(wave) == pytest.approx(30 * 256 * OUTPUT_RATE_HZ / tiny.RATE_HZ, abs=1)


@pytest.mark.parametrize("n_streams", [2, 8])
def test_interleaved_streams_sound_as_alone(exact, n_streams):
    rng = random.Random(n_streams)
    said = [codes_of(rng.randint(1, 40)) for _ in range(n_streams)]
    alone = [torch.cat(said_by(exact, codes)) for codes in said]
    streams = [exact.new_stream(VOICE) for _ in said]
    left = [blocks_of(exact, codes) for codes in said]
    found: list[list[Tensor]] = [[] for _ in said]
    while some := [i for i in range(n_streams) if left[i]]:
        rows = rng.sample(some, rng.randint(1, len(some)))
        waves = exact.decode([streams[i] for i in rows], [left[i].pop(0) for i in rows])
        for i, wave in zip(rows, waves, strict=True):
            found[i].append(wave)
    for waves, expected in zip(found, alone, strict=True):
        assert (torch.cat(waves) - expected).abs().max() < 1e-6


def test_the_engine_makes_the_demos_sound_of_frames_as_they_come(exact):
    assert isinstance(exact, VoiceDecoder)
    engine, rng = VocoderEngine(exact, VocoderConfig(max_batch=3), SimClock()), random.Random(5)
    engine.warm_up()
    left = {str(n): codes_of(n) for n in (25, 26)}
    pcm = dict.fromkeys(left, b"")
    for job_id in left:
        engine.open(job_id, voice=VOICE)
    while some := [job_id for job_id, codes in left.items() if codes]:
        job_id, n = rng.choice(some), rng.randint(1, 30)
        engine.feed(job_id, torch.tensor(left[job_id][:n])[:, None])
        del left[job_id][:n]
        if not left[job_id]:
            engine.finish(job_id)
        for chunk in engine.step():
            pcm[chunk.job_id] += chunk.pcm
    while chunks := engine.step():
        for chunk in chunks:
            pcm[chunk.job_id] += chunk.pcm
    for job_id, found in pcm.items():
        wanted = heard(demo(int(job_id), torch.float64).waves)
        assert np.abs(np.frombuffer(found, "<i2") / 32767 - wanted).max() < 1e-4


def test_what_does_not_fit_is_refused(decoder):
    with pytest.raises(BadInputError, match="no voice 'eva'; there is glm"):
        decoder.new_stream("eva")
    with pytest.raises(BadInputError, match="codes must lie in"):
        decoder.check_codes(torch.tensor([[tiny.N_CODES]]))
    stream = decoder.new_stream(VOICE)
    with pytest.raises(ValueError, match="different streams"):
        decoder.decode([stream, stream], [TAIL, TAIL])


@pytest.mark.parametrize("file", DECODER_FILES)
def test_a_file_that_is_missing_or_lacks_something_is_refused(path, tmp_path, file):
    folder = tmp_path / DECODER
    folder.mkdir()
    for name in {*DECODER_FILES} - {file}:
        (folder / name).symlink_to(path / DECODER / name)

    def load() -> None:
        GlmDecoder.from_pretrained(tmp_path, "cpu", torch.float32)

    with pytest.raises(BadInputError, match=f"cannot read .*{file}"):
        load()
    (folder / file).write_bytes(b"\xff: no weights")
    with pytest.raises(BadInputError, match=f"cannot read .*{file}"):
        load()
    if file == "config.yaml":
        (folder / file).write_text(tiny.CONFIG.replace("block_size: 10", "block_size: 25"))
        with pytest.raises(BadInputError, match="block_size has to be 10, it is 25"):
            load()
        (folder / file).write_text("{}")
        with pytest.raises(BadInputError, match="sample_rate has to be 22050, it is nothing"):
            load()
        return
    stored = torch.load(path / DECODER / file, weights_only=True)
    names = {"flow.pt": "encoder.after_norm.bias", "hift.pt": "conv_post.bias"}
    del stored[names[file]]
    torch.save(stored, folder / file)
    with pytest.raises(BadInputError, match=f"the codec's weights lack {names[file]}"):
        load()
