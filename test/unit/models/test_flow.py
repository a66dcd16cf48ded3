"""CosyVoice 2 and 3 against their references, which compute one stream alone, on tiny weights."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_live.clock import SimClock
from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.flow import AHEAD, CHUNK
from sglang_live.models.codecs.flow.mels import FlowInput
from sglang_live.models.cosyvoice.decoder import CosyVoiceDecoder
from sglang_live.stages.vocoder.batcher import VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.decoders import VoiceDecoder
from test.flow import checkpoint as tiny

SAMPLES_PER_CODE = 960
TAIL = torch.full((1, 1), END_CODE)


@pytest.fixture(scope="module", params=[2, 3])
def version(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, version) -> Path:
    path = tmp_path_factory.mktemp("cosyvoice")
    tiny.save(path, version)
    return path


@pytest.fixture(scope="module")
def decoder(path) -> CosyVoiceDecoder:
    return CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact(path) -> CosyVoiceDecoder:
    """In float64, where the phases of a source of some seconds are exact."""
    return CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float64)


def chunks_of(decoder: CosyVoiceDecoder, voice: str, codes: Tensor) -> list[Tensor]:
    """[n, 1] each, as the engine cuts them by the stream's rule."""
    rule, chunks, rest = decoder.new_stream(voice).rule, [], codes[:, None]
    while len(rest) >= (n := rule.frames(len(chunks))):
        chunks.append(rest[:n])
        rest = rest[n:]
    return [*chunks, torch.cat((rest, TAIL))]


def inputs_of(decoder: CosyVoiceDecoder, voice: str, codes: Tensor) -> list[FlowInput]:
    stream, inputs, n = decoder.new_stream(voice), [], 0
    for chunk in chunks_of(decoder, voice, codes):
        is_end = bool(chunk[-1] == END_CODE)
        n += len(chunk) - is_end
        ahead, cut = (0, 0) if is_end else (AHEAD, CHUNK)
        inputs.append(FlowInput(stream.voice, codes[:n], ahead, cut))
    return inputs


# Lengths with one chunk, with an end at once behind a chunk, and with chunks of all sizes.
STREAMS = [("ada", 20), ("ben", 44 + 3), ("eve", 25 + 50 + 100 + 13), ("ada", 40 + 3 + 50)]


@cache
def expected_of(
    version: int, voice: str, n: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    return tiny.reference(version, voice, tiny.random_codes(n, seed=n), dtype)


@pytest.mark.parametrize(("voice", "n"), STREAMS)
def test_the_mel_of_every_chunk_equals_the_references_call(decoder, version, voice, n):
    codes = tiny.random_codes(n, seed=n)
    expected, _ = expected_of(version, voice, n, torch.float32)
    done = 0
    for given, mel in zip(inputs_of(decoder, voice, codes), expected, strict=True):
        found = decoder._flow.mels([given])[0]
        assert found.shape[1] == done + mel.shape[1]
        assert (found[:, done:] - mel).abs().max() < 1e-5 * mel.abs().max()
        done = found.shape[1]
    assert done == 2 * n


def test_chunks_of_all_ages_and_voices_share_a_batch(decoder, version):
    given, expected = [], []
    for voice, n in STREAMS:
        codes = tiny.random_codes(n, seed=n)
        given += inputs_of(decoder, voice, codes)
        done = 0
        for mel in expected_of(version, voice, n, torch.float32)[0]:
            expected.append((done, mel))
            done += mel.shape[1]
    assert len(given) == 1 + 2 + 4 + 3
    for found, (done, mel) in zip(decoder._flow.mels(given), expected, strict=True):
        assert (found[:, done:] - mel).abs().max() < 1e-5 * mel.abs().max()


def test_voice_codes_and_what_lies_ahead_are_heard(decoder):
    """Else equality with the reference would say little."""
    codes = tiny.random_codes(60, seed=1)
    other = torch.cat((codes[:57], (codes[57:] + 1) % tiny.N_CODES))
    given = [
        FlowInput(decoder.new_stream(voice).voice, said, 3, cut)
        for voice, said, cut in [
            ("ada", codes, CHUNK),
            ("ada", other, CHUNK),
            ("eve", codes, CHUNK),
            ("ada", codes, 0),
        ]
    ]
    mel, *others = decoder._flow.mels(given)
    ahead, voice, whole = ((mel - found).abs().amax(0) / mel.abs().max() for found in others)
    assert ahead[-1] > 1e-3
    assert voice.min() > 1e-2 and whole.max() > 1e-2


@pytest.mark.parametrize(("voice", "n"), STREAMS)
def test_the_sound_equals_the_references(exact, version, voice, n):
    codes = tiny.random_codes(n, seed=n)
    _, expected = expected_of(version, voice, n, torch.float64)
    assert torch.cat(expected).std() > 0.03
    stream = exact.new_stream(voice)
    found = [exact.decode([stream], [chunk])[0] for chunk in chunks_of(exact, voice, codes)]
    assert [len(wave) for wave in found] == [len(wave) for wave in expected]
    assert sum(map(len, found)) == n * SAMPLES_PER_CODE
    assert (torch.cat(found) - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize("n_streams", [2, 8])
def test_interleaved_streams_sound_as_alone(exact, n_streams):
    rng, names = random.Random(n_streams), [*tiny.PROMPTS]
    said = [
        (names[i % 3], tiny.random_codes(rng.randint(1, 100), seed=i)) for i in range(n_streams)
    ]
    alone = []
    for voice, codes in said:
        stream = exact.new_stream(voice)
        chunks = chunks_of(exact, voice, codes)
        alone.append(torch.cat([exact.decode([stream], [chunk])[0] for chunk in chunks]))
    streams = [exact.new_stream(voice) for voice, _ in said]
    left = [chunks_of(exact, voice, codes) for voice, codes in said]
    found: list[list[Tensor]] = [[] for _ in said]
    while some := [i for i in range(n_streams) if left[i]]:
        rows = rng.sample(some, rng.randint(1, len(some)))
        waves = exact.decode([streams[i] for i in rows], [left[i].pop(0) for i in rows])
        for i, wave in zip(rows, waves, strict=True):
            found[i].append(wave)
    for waves, expected in zip(found, alone, strict=True):
        assert (torch.cat(waves) - expected).abs().max() < 1e-7


def test_the_engine_makes_the_references_sound_of_frames_as_they_come(exact, version):
    assert isinstance(exact, VoiceDecoder)
    engine, rng = VocoderEngine(exact, VocoderConfig(max_batch=3), SimClock()), random.Random(5)
    engine.warm_up()
    said = {f"job-{voice}": (voice, tiny.random_codes(75, seed=7)) for voice in tiny.PROMPTS}
    for job_id, (voice, _) in said.items():
        engine.open(job_id, voice=voice)
    fed, pcm = dict.fromkeys(said, 0), dict.fromkeys(said, b"")
    while said.keys() & {job_id for job_id, n in fed.items() if n < 75}:
        job_id = rng.choice([job_id for job_id, n in fed.items() if n < 75])
        n = rng.randint(1, 30)
        engine.feed(job_id, said[job_id][1][fed[job_id] : fed[job_id] + n, None])
        fed[job_id] = min(75, fed[job_id] + n)
        if fed[job_id] == 75:
            engine.finish(job_id)
        for chunk in engine.step():
            pcm[chunk.job_id] += chunk.pcm
    while chunks := engine.step():
        for chunk in chunks:
            pcm[chunk.job_id] += chunk.pcm
    for job_id, (voice, codes) in said.items():
        expected = torch.cat(tiny.reference(version, voice, codes, torch.float64)[1]).numpy()
        found = np.frombuffer(pcm[job_id], "<i2") / 32767
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-4


def test_what_does_not_fit_is_refused(decoder):
    with pytest.raises(BadInputError, match=r"no voice 'eva'; there are ada, ben, eve"):
        decoder.new_stream("eva")
    with pytest.raises(BadInputError, match="codes must lie in"):
        decoder.check_codes(torch.tensor([[tiny.N_CODES]]))
    stream = decoder.new_stream("ada")
    with pytest.raises(ValueError, match="different streams"):
        decoder.decode([stream, stream], [TAIL, TAIL])


@pytest.mark.parametrize("file", ["flow.pt", "hift.pt", "spk2info.pt"])
def test_a_file_that_is_missing_or_lacks_something_is_refused(path, version, tmp_path, file):
    for name in {"flow.pt", "hift.pt", "spk2info.pt"} - {file}:
        (tmp_path / name).symlink_to(path / name)

    def load() -> None:
        CosyVoiceDecoder.from_pretrained(tmp_path, "cpu", torch.float32)

    # Recordings may stand in for voices.
    none = "neither spk2info.pt nor recordings"
    lacking = none if file == "spk2info.pt" else f"cannot read .*{file}"
    with pytest.raises(BadInputError, match=lacking):
        load()
    (tmp_path / file).write_bytes(b"no weights")
    with pytest.raises(BadInputError, match=f"cannot read .*{file}"):
        load()
    stored = torch.load(path / file, weights_only=True)
    if file == "spk2info.pt":
        torch.save(stored | {"ada": {}}, tmp_path / file)
        with pytest.raises(BadInputError, match="ada is no voice for a flow"):
            load()
        stored["ben"]["prompt_speech_feat"] = stored["ben"]["prompt_speech_feat"][:, 1:]
        torch.save(stored, tmp_path / file)
        with pytest.raises(BadInputError, match="31 codes do not fit 61 columns"):
            load()
        torch.save({}, tmp_path / file)
        with pytest.raises(BadInputError, match="has no voices"):
            load()
    else:
        of_flow = {2: "encoder.after_norm.bias", 3: "decoder.estimator.norm_out.linear.weight"}
        del stored[of_flow[version] if file == "flow.pt" else "generator.conv_post.bias"]
        torch.save(stored, tmp_path / file)
        with pytest.raises(BadInputError, match="the codec's weights lack"):
            load()
