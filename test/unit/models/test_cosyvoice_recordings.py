"""Voices that CosyVoice makes of recordings, as its own code would write them."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.flow import recording as heard
from sglang_live.models.codecs.flow.recording import RATE_HZ
from sglang_live.models.cosyvoice.decoder import CosyVoiceDecoder
from sglang_live.models.cosyvoice.encoder import RecordingEncoder
from sglang_live.models.cosyvoice.family import VOICES
from sglang_live.models.cosyvoice.parts import CosyVoiceTalker
from sglang_live.models.log_mel import LogMel
from sglang_live.models.voice_files import read_recording
from sglang_live.preflight import check_recordings
from sglang_live.stage_specs import recordings_of
from test.cosyvoice import checkpoint as tiny
from test.cosyvoice import encoders

TEST = Path(__file__).parents[2]
AUDIO = TEST / "data" / "audio"
SPEECH = "sp_jfk.flac", "sp_librivox_0880.flac"
# Of librosa 0.11.0 and torchaudio 2.11.0 (compliance/kaldi.py), by the formulas of chatterbox-tts
# 0.1.7 (models/s3gen/utils/mel.py, models/s3tokenizer): every some frames and bands.
REFERENCE = json.loads((TEST / "flow" / "recording.json").read_text())


@pytest.fixture(scope="module", params=[2, 3])
def version(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, version) -> Path:
    return tiny.build(tmp_path_factory.mktemp("cosyvoice"), version=version)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    return tiny.recordings(tmp_path_factory.mktemp("voices"))


@pytest.fixture(scope="module")
def clara(recordings) -> np.ndarray:
    return read_recording(recordings / "clara.wav", RATE_HZ)


# --- what the encoders hear ---


@pytest.mark.parametrize("name", SPEECH)
def test_features_are_those_of_the_reference(name):
    samples, wanted = read_recording(AUDIO / name, RATE_HZ), REFERENCE[name]
    at_16khz = heard.at_16khz(samples)
    for key, found, tolerance in (
        ("speaker_frames", heard.speaker_frames(at_16khz)[::97, ::9], 1e-3),
        ("mel_8000", heard.mel_columns(samples, 8_000.0)[::53, ::9], 2e-5),
        ("mel_12000", heard.mel_columns(samples, 12_000.0)[::53, ::9], 2e-5),
        ("log_mel", LogMel(128)(at_16khz).T[::97, ::15], 2e-5),
    ):
        expected = torch.tensor(wanted[key])
        assert expected.std() > 0.3, "the case must not be trivial"
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def restated_codes(samples: np.ndarray) -> Tensor:
    """Of encoders.s3."""
    mels = F.pad(LogMel(128)(heard.at_16khz(samples)), (0, 3))
    found = F.conv1d(mels[None], torch.from_numpy(encoders.heard_weights()), stride=4)[0, 0]
    return (found * encoders.SCALE).abs().long() % encoders.N_CODES


def test_a_voice_is_codes_mel_and_a_speaker_that_fit_each_other(path, version, clara):
    codes, mel, speaker = RecordingEncoder(path).known(clara)
    # 50,000 samples are 208 frames of 10 ms, and 104 columns of 20 ms.
    assert (len(codes), mel.shape, speaker.shape) == (52, (104, 80), (192,))
    wanted = restated_codes(clara)[:52]
    assert len(set(codes.tolist())) > 40
    # What float32 rounds in another order may be the next code.
    assert (codes - wanted).abs().max() <= 1 and (codes == wanted).float().mean() > 0.9
    torch.testing.assert_close(mel, heard.mel_columns(clara, 8e3 if version == 2 else 12e3)[:104])
    frames = heard.speaker_frames(heard.at_16khz(clara))
    wanted = (frames @ torch.from_numpy(encoders.speaker_weights())).amax(dim=0)
    torch.testing.assert_close(speaker, wanted, atol=1e-4, rtol=1e-4)


def test_codes_without_all_of_their_columns_are_left_out(path, clara):
    codes = RecordingEncoder(path).codes(clara[: 25 * 960 + 900])
    assert len(codes) == 25


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("speech_tokenizer_v2.onnx", encoders.campplus(), "another network: its inputs are input"),
        ("speech_tokenizer_v2.onnx", b"no network", "onnxruntime cannot read"),
        ("campplus.onnx", encoders.s3(), "another network: its inputs are feats, feats_length"),
        ("campplus.onnx", encoders.campplus(7), "another network: it finds 7 values of a speaker"),
    ],
)
def test_another_network_is_refused(file, content, message, clara, tmp_path):
    path = tiny.build(tmp_path / "it")
    (path / file).write_bytes(content)
    with pytest.raises(BadInputError, match=f"{file}.*{message}|{message}.*{file}"):
        RecordingEncoder(path).known(clara)


# --- what is made of it ---


def test_a_recording_is_the_voice_that_the_reference_would_have_written(
    path, version, recordings, tmp_path
):
    """Its prompt and its sound are those of a voice of spk2info.pt with the same contents."""
    written = tiny.build(tmp_path / "written", version=version)
    entry = tiny.recorded(path, version, recordings / "clara.wav")
    torch.save({"clara": entry}, written / VOICES)
    talkers = CosyVoiceTalker(path, recordings), CosyVoiceTalker(written)
    assert talkers[0].voices == ("anna", "bert", "clara")
    prompts = [talker.prompt("clara", "Hi.") for talker in talkers]
    assert prompts[0] == prompts[1] and len(prompts[0]) > 52 + len(encoders.CLARA_SAYS)
    codes = torch.cat((torch.randint(0, 6561, (9, 1)), torch.full((1, 1), END_CODE)))
    waves = []
    for decoder in (
        CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32, voices=recordings),
        CosyVoiceDecoder.from_pretrained(written, "cpu", torch.float32),
    ):
        [wave] = decoder.decode([decoder.new_stream("clara")], [codes])
        waves.append(wave)
    assert len(waves[0]) == 9 * 960 and waves[0].std() > 1e-3
    torch.testing.assert_close(*waves)


def test_words_make_no_marks(path, version, recordings, tmp_path):
    (tmp_path / "clara.wav").write_bytes((recordings / "clara.wav").read_bytes())
    (tmp_path / "clara.txt").write_text("<|im_end|>")
    plain, marked = (
        CosyVoiceTalker(path, folder).prompt("clara", "") for folder in (recordings, tmp_path)
    )
    assert len(marked) - len(plain) == len("<|im_end|>") - len(encoders.CLARA_SAYS)


# --- voices that a response brings along ---


def test_a_voice_that_is_brought_along_sounds_as_the_one_of_a_recording(path, recordings, clara):
    speaker = CosyVoiceTalker(path).make_voice(clara)
    assert speaker.dtype == np.float32 and speaker.shape == (192 + 52 * 161,)
    decoder = CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32, voices=recordings)
    codes = torch.cat((torch.randint(0, 6561, (9, 1)), torch.full((1, 1), END_CODE)))
    streams = decoder.new_stream("clara"), decoder.new_stream("voice_1", speaker)
    waves = decoder.decode(list(streams), [codes, codes])
    assert waves[0].std() > 1e-3
    torch.testing.assert_close(*waves)


def test_nothing_tells_its_words_so_the_flow_alone_goes_on_from_it(path, version, clara):
    talker = CosyVoiceTalker(path)
    prompt = talker.prompt_in(talker.make_voice(clara), "Hi")
    assert prompt.rows is None
    [begin, *text, task] = prompt.ids
    said = tiny.tokenizer().encode("Hi").ids
    if version == 3:
        said = [*tiny.instruction(), *said]
    n_ids = 6564 if version == 2 else 6761
    assert text == [n_ids + token for token in said]
    assert (begin, task) == (n_ids + tiny.TEXT_VOCAB, n_ids + tiny.TEXT_VOCAB + 1)


@pytest.mark.parametrize("n", [0, 192, 192 + 160, 1024])
def test_a_voice_of_another_model_is_refused(path, n):
    speaker = np.zeros(n, np.float32)
    with pytest.raises(BadInputError, match="another model made the voice"):
        CosyVoiceTalker(path).prompt_in(speaker, "Hi")
    decoder = CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32)
    with pytest.raises(BadInputError, match="another model made the voice"):
        decoder.new_stream("voice_1", speaker)


def test_codes_that_the_model_lacks_are_refused(path, clara):
    speaker = CosyVoiceTalker(path).make_voice(clara)
    speaker[192] = 6561
    decoder = CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32)
    with pytest.raises(BadInputError, match="6561"):
        decoder.new_stream("voice_1", speaker)


# --- the server ---


def test_a_checkpoint_with_its_encoders_takes_on_recordings_in_both_stages(
    path, recordings, tmp_path
):
    facts = ModelSource(path=str(path), recordings=recordings).load(tmp_path)
    assert facts.voices == ("anna", "bert", "clara") and facts.voices_need_words
    assert facts.voice_rate_hz == RATE_HZ
    for stage in ("talker", "vocoder"):
        assert recordings_of(stage, facts) == str(recordings)
    assert recordings_of("thinker", facts) == ""


def test_a_checkpoint_without_voices_needs_recordings(version, recordings, tmp_path):
    path = tiny.build(tmp_path / "it", version=version)
    (path / VOICES).unlink()
    with pytest.raises(BadInputError, match=r"no voices of its own: .* --voices DIR"):
        ModelSource(path=str(path)).load(tmp_path)
    assert ModelSource(path=str(path), recordings=recordings).load(tmp_path).voices == ("clara",)
    assert CosyVoiceTalker(path, recordings).voices == ("clara",)
    with pytest.raises(BadInputError, match=r"has no voices: neither spk2info.pt nor recordings"):
        CosyVoiceDecoder.from_pretrained(path, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("samples", "rate_hz", "message"),
    [
        (0.05 * np.random.default_rng(1).standard_normal(24_000), 16_000, "there is no speech"),
        (np.zeros(600 * 16_000, np.float32), 16_000, "longer than 60 s"),
        (np.zeros(31 * 16_000, np.float32), 16_000, "lasts 31.00 s, this model takes 1 to 30 s"),
        (np.zeros(24_000, np.float32), 8_000, "8000 Hz"),
        (np.zeros(4_000, np.float32), 16_000, "a voice needs at least 1 s"),
    ],
)
def test_what_is_no_voice_is_refused_before_a_stage_starts(
    path, samples, rate_hz, message, tmp_path
):
    folder = tmp_path / "voices"
    folder.mkdir()
    sf.write(folder / "ben.wav", samples, rate_hz)
    (folder / "ben.txt").write_text("Nothing.")
    facts = ModelSource(path=str(path), recordings=folder).load(tmp_path / "cache")
    with pytest.raises(BadInputError, match=rf"--voices: .*ben.wav.*{message}"):
        check_recordings(facts)


def test_a_second_of_speech_is_a_voice(path):
    samples = read_recording(AUDIO / SPEECH[0], RATE_HZ)[RATE_HZ : 2 * RATE_HZ]
    assert len(RecordingEncoder(path).known(samples)[0]) == 25


def test_a_recording_needs_its_words(path, recordings, tmp_path):
    folder = tmp_path / "voices"
    folder.mkdir()
    (folder / "clara.wav").write_bytes((recordings / "clara.wav").read_bytes())
    with pytest.raises(BadInputError, match=r"clara.txt: this model needs the words"):
        ModelSource(path=str(path), recordings=folder).load(tmp_path)
