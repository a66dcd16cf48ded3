"""Step-Audio 2's decoder against the restated one, which computes one stream alone."""

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
from sglang_live.models.codecs.flow.cached import FlowChunk
from sglang_live.models.step_audio.decoder import StepAudioDecoder
from sglang_live.stages.vocoder.batcher import VocoderEngine
from sglang_live.stages.vocoder.config import VocoderConfig
from sglang_live.stages.vocoder.decoders import VoiceDecoder
from test.flow.checkpoint import random_codes
from test.step_audio import token2wav as tiny

SAMPLES_PER_CODE, AHEAD = 960, 3
TAIL = torch.full((1, 1), END_CODE)
# Lengths with one chunk, with an end at once behind a chunk, and some at which columns are left
# behind.
STREAMS = [("ada", 20), ("ben", 28), ("eve", 7 * 25 + 13), ("ada", 5 * 25 + 3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("step")
    tiny.save(path / "token2wav")
    return path


@pytest.fixture(scope="module")
def decoder(path) -> StepAudioDecoder:
    return StepAudioDecoder.from_pretrained(path, "cpu", torch.float32)


@pytest.fixture(scope="module")
def exact(path) -> StepAudioDecoder:
    """In float64, where the phases of a source of some seconds are exact."""
    return StepAudioDecoder.from_pretrained(path, "cpu", torch.float64)


def chunks_of(decoder: StepAudioDecoder, voice: str, codes: Tensor) -> list[Tensor]:
    """[n, 1] each, as the engine cuts them by the stream's rule."""
    rule, chunks, rest = decoder.new_stream(voice).rule, [], codes[:, None]
    while len(rest) >= (n := rule.frames(len(chunks))):
        chunks.append(rest[:n])
        rest = rest[n:]
    return [*chunks, torch.cat((rest, TAIL))]


@cache
def expected_of(voice: str, n: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    try:
        return tiny.stream(voice, dtype).run(random_codes(n, seed=n))
    finally:
        for module in tiny.weights():
            module.float()


def mels_of(decoder: StepAudioDecoder, streams: list[tuple[str, int]]) -> list[list[Tensor]]:
    """Of each stream the mel of every chunk; those of one number share a batch."""
    flow = decoder._flow
    voices = [decoder.new_stream(voice).voice for voice, _ in streams]
    left = [random_codes(n, seed=n) for _, n in streams]
    states, found = [voice.state for voice in voices], [[] for _ in streams]
    while due := [i for i, codes in enumerate(left) if len(codes)]:
        chunks = []
        for i in due:
            goes_on = len(left[i]) >= 25 + AHEAD
            codes = left[i][: 25 + AHEAD] if goes_on else left[i]
            chunks.append(FlowChunk(voices[i], states[i], codes, AHEAD if goes_on else 0))
            left[i] = left[i][25:] if goes_on else left[i][:0]
        for i, (mel, state) in zip(due, flow.mels(chunks), strict=True):
            found[i].append(mel)
            states[i] = state
    return found


@pytest.mark.parametrize(("voice", "n"), STREAMS)
def test_the_mel_of_every_chunk_equals_the_references_call(decoder, voice, n):
    expected, _ = expected_of(voice, n, torch.float32)
    [found] = mels_of(decoder, [(voice, n)])
    assert [mel.shape for mel in found] == [mel.shape for mel in expected]
    assert sum(mel.shape[1] for mel in found) == 2 * n
    for mel, other in zip(found, expected, strict=True):
        assert (mel - other).abs().max() < 1e-5 * other.abs().max()


def test_streams_of_all_ages_and_voices_share_a_batch(decoder):
    for stream, found in zip(STREAMS, mels_of(decoder, STREAMS), strict=True):
        for mel, other in zip(found, expected_of(*stream, torch.float32)[0], strict=True):
            assert (mel - other).abs().max() < 1e-5 * other.abs().max()


def test_what_is_kept_of_a_stream_is_bounded_and_its_voice_is_shared(decoder):
    streams = [decoder.new_stream("eve") for _ in range(2)]
    voice = streams[0].voice
    assert streams[0].flow is streams[1].flow is voice.state
    before = [layer.keys.clone() for step in voice.state.steps for layer in step]
    sizes = []
    for chunk in chunks_of(decoder, "eve", random_codes(200, seed=1))[:-1]:
        decoder.decode(streams[:1], [chunk])
        sizes.append(streams[0].flow.steps[0][0].keys.shape[3])
    most = voice.n_columns + 100
    assert sizes == [min(voice.n_columns + 50 * n, most) for n in range(1, len(sizes) + 1)]
    assert max(sizes) == most == 220
    after = [layer.keys for step in voice.state.steps for layer in step]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_voice_codes_and_what_was_before_are_heard(decoder):
    """Else equality with the reference would say little."""
    codes = random_codes(28, seed=1)
    other = torch.cat((codes[:27], (codes[27:] + 1) % tiny.N_CODES))
    ada, eve = (decoder.new_stream(name).voice for name in ("ada", "eve"))
    flow = decoder._flow
    [(_, later)] = flow.mels([FlowChunk(ada, ada.state, random_codes(28, seed=2), AHEAD)])
    found = flow.mels(
        [
            FlowChunk(ada, ada.state, codes, AHEAD),
            FlowChunk(ada, ada.state, other, AHEAD),
            FlowChunk(eve, eve.state, codes, AHEAD),
            FlowChunk(ada, later, codes, AHEAD),
        ]
    )
    (mel, _), *others = found
    ahead, voice, past = ((mel - each).abs().amax(0) / mel.abs().max() for each, _ in others)
    assert ahead[-1] > 1e-3 and voice.min() > 1e-2 and past.min() > 1e-2


@pytest.mark.parametrize(("voice", "n"), STREAMS)
def test_the_sound_equals_the_references(exact, voice, n):
    _, expected = expected_of(voice, n, torch.float64)
    assert torch.cat(expected).std() > 0.03
    stream = exact.new_stream(voice)
    chunks = chunks_of(exact, voice, random_codes(n, seed=n))
    found = [exact.decode([stream], [chunk])[0] for chunk in chunks]
    assert [len(wave) for wave in found] == [len(wave) for wave in expected]
    assert sum(map(len, found)) == n * SAMPLES_PER_CODE
    assert (torch.cat(found) - torch.cat(expected)).abs().max() < 1e-5


@pytest.mark.parametrize("n_streams", [2, 8])
def test_interleaved_streams_sound_as_alone(exact, n_streams):
    rng, names = random.Random(n_streams), [*tiny.PROMPTS]
    said = [(names[i % 3], random_codes(rng.randint(1, 100), seed=i)) for i in range(n_streams)]
    alone = []
    for voice, codes in said:
        stream = exact.new_stream(voice)
        chunks = chunks_of(exact, voice, codes)
        alone.append(torch.cat([exact.decode([stream], [chunk])[0] for chunk in chunks]))
    streams = [exact.new_stream(voice) for voice, _ in said]
    left = [chunks_of(exact, voice, codes) for voice, codes in said]
    found: list[list[Tensor]] = [[] for _ in said]
    while due := [i for i, chunks in enumerate(left) if chunks]:
        # In turn, or together.
        due = rng.sample(due, rng.randint(1, len(due)))
        waves = exact.decode([streams[i] for i in due], [left[i].pop(0) for i in due])
        for i, wave in zip(due, waves, strict=True):
            found[i].append(wave)
    for waves, wave in zip(found, alone, strict=True):
        assert (torch.cat(waves) - wave).abs().max() < 1e-6


def test_a_stream_without_codes_is_silent(decoder):
    streams = [decoder.new_stream("ada"), decoder.new_stream("eve")]
    chunks = chunks_of(decoder, "eve", random_codes(28, seed=5))
    empty, sound = decoder.decode(streams, [TAIL, chunks[0]])
    assert len(empty) == 0 and len(sound) == (50 - 8) * 480


def test_the_engine_makes_the_references_sound_of_frames_as_they_come(exact):
    assert isinstance(exact, VoiceDecoder)
    engine, rng = VocoderEngine(exact, VocoderConfig(max_batch=3), SimClock()), random.Random(5)
    engine.warm_up()
    codes = random_codes(75, seed=75)
    fed, pcm = {}, {}
    for voice in tiny.PROMPTS:
        engine.open(voice, voice=voice)
        fed[voice], pcm[voice] = 0, b""

    def hear() -> bool:
        chunks = engine.step()
        for chunk in chunks:
            pcm[chunk.job_id] += chunk.pcm
        return bool(chunks)

    while left := [voice for voice, n in fed.items() if n < len(codes)]:
        voice, n = rng.choice(left), rng.randint(1, 30)
        engine.feed(voice, codes[fed[voice] : fed[voice] + n, None])
        fed[voice] += n
        if fed[voice] >= len(codes):
            engine.finish(voice)
        hear()
    while hear():
        pass
    for voice in tiny.PROMPTS:
        expected = torch.cat(expected_of(voice, 75, torch.float64)[1]).numpy()
        found = np.frombuffer(pcm[voice], "<i2") / 32767
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-4


def test_bad_input_is_refused_by_name(decoder):
    with pytest.raises(BadInputError, match="there is no voice 'bob'; there are ada, ben, eve"):
        decoder.new_stream("bob")
    with pytest.raises(BadInputError):
        decoder.check_codes(torch.tensor([[tiny.N_CODES]]))
    stream = decoder.new_stream("ada")
    with pytest.raises(ValueError, match="2 chunks do not fit"):
        decoder.decode([stream, stream], [TAIL, TAIL])


@pytest.mark.parametrize("file", ["flow.pt", "hift.pt", "spk2info.pt"])
def test_a_broken_checkpoint_is_refused_by_name(path, tmp_path, file):
    room = tmp_path / "token2wav"
    room.mkdir()
    for name in {"flow.pt", "hift.pt", "spk2info.pt"} - {file}:
        (room / name).symlink_to(path / "token2wav" / name)

    def load() -> None:
        StepAudioDecoder.from_pretrained(tmp_path, "cpu", torch.float32)

    with pytest.raises(BadInputError, match=f"cannot read .*{file}"):
        load()
    stored = torch.load(path / "token2wav" / file, weights_only=True)
    if file == "spk2info.pt":
        short = {
            name: value[:, : 2 if "token" in name else 4] for name, value in stored["ada"].items()
        }
        torch.save({"ada": short}, room / file)
        with pytest.raises(BadInputError, match="ada: a recording of 2 codes is too short"):
            load()
        torch.save({}, room / file)
        with pytest.raises(BadInputError, match="has no voices"):
            load()
        return
    names = {"flow.pt": "decoder.estimator.blocks.1.attn.q_norm.bias"}
    del stored[names.get(file, "generator.conv_post.bias")]
    torch.save(stored, room / file)
    with pytest.raises(BadInputError, match="the codec's weights lack"):
        load()
