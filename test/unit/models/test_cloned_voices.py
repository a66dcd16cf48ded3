"""Voices of recordings: the files, the speaker encoder, the prompts, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models import voice_files
from sglang_live.models.cascade.family import FAMILY as CASCADE
from sglang_live.models.cascade.parts import load_talker
from sglang_live.models.family import ModelFacts, model_facts
from sglang_live.models.qwen3_tts.parts import TTSTalker
from sglang_live.models.qwen3_tts.speaker import RATE_HZ, SpeakerEncoder, embeddings_of
from sglang_live.preflight import check_recordings
from sglang_live.stage_specs import recordings_of
from test.chatterbox import checkpoint as tiny_chatterbox
from test.chatterbox_turbo import checkpoint as tiny_turbo
from test.cosyvoice import checkpoint as tiny_cosyvoice
from test.engine import tiny_cascade
from test.qwen3_tts import checkpoint as tiny

AUDIO = Path(__file__).parents[2] / "data" / "audio"
JFK, BOOK = AUDIO / "sp_jfk.flac", AUDIO / "sp_librivox_0880.flac"
# Embeddings that qwen_tts 0.1.1 computes with the tiny weights.
REFERENCE = json.loads((Path(__file__).parents[2] / "qwen3_tts" / "speaker.json").read_text())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("base"), clones=True)


@pytest.fixture
def recordings(tmp_path) -> Path:
    folder = tmp_path / "voices"
    folder.mkdir()
    shutil.copy(JFK, folder / "John.flac")
    shutil.copy(BOOK, folder / "anna.flac")
    (folder / ".hidden").touch()
    return folder


def check(folder: Path, **limits: float) -> None:
    """Of a model that takes on voices."""
    facts = ModelFacts(path=folder, family="", weights=folder, voices=(), recordings=folder)
    check_recordings(replace(facts, **limits))


def write(folder: Path, samples: np.ndarray, name: str = "ben.wav") -> Path:
    folder.mkdir(exist_ok=True)
    sf.write(folder / name, samples, 16_000)
    return folder


# --- the speaker encoder ---


@pytest.mark.parametrize("file", [JFK, BOOK])
def test_an_embedding_is_that_of_the_reference(checkpoint, file):
    wanted = torch.tensor(REFERENCE[file.name])
    assert wanted.std() > 0.5, "the case must not be trivial"
    [found] = embeddings_of(checkpoint, [file])
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


def test_the_reference_s_defaults_are_the_widths_of_published_checkpoints():
    with torch.device("meta"):
        encoder = SpeakerEncoder({"enc_dim": 1024})
    shapes = {name: tuple(weight.shape) for name, weight in encoder.state_dict().items()}
    assert shapes["blocks.0.conv.weight"] == (512, 128, 5)
    assert shapes["blocks.3.res2net_block.blocks.6.conv.weight"] == (64, 64, 3)
    assert shapes["blocks.3.se_block.conv1.weight"] == (128, 512, 1)
    assert shapes["asp.tdnn.conv.weight"] == (128, 4608, 1)
    assert shapes["fc.weight"] == (1024, 3072, 1)


# --- files ---


def test_a_voice_has_the_name_of_its_file(recordings):
    files = voice_files.voice_files(recordings)
    assert list(files) == ["John", "anna"]
    samples = voice_files.read_recording(files["John"], RATE_HZ)
    assert samples.dtype == np.float32 and len(samples) == pytest.approx(11 * RATE_HZ, abs=24)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "has 0 recordings, 1 to 256"),
        (("anna.txt",), r"anna.txt is no recording: it has none of .wav, .flac"),
        (("anna.wav", "Anna.flac"), r"anna.wav are one name of two voices"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(BadInputError, match=message):
        voice_files.voice_files(tmp_path)


def test_a_folder_that_is_absent_or_too_full_is_refused(tmp_path, monkeypatch):
    with pytest.raises(BadInputError, match="--voices: there is no directory"):
        voice_files.voice_files(tmp_path / "none")
    monkeypatch.setattr(voice_files, "MAX_VOICES", 1)
    for name in ("a.wav", "b.wav"):
        (tmp_path / name).touch()
    with pytest.raises(BadInputError, match="has 2 recordings"):
        voice_files.voice_files(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "message"),
    [(0.1, r"ben.wav: It lasts 0.10 s, a voice needs at least 1 s"), (600, "longer than 60 s")],
)
def test_a_recording_is_neither_too_short_nor_too_long(tmp_path, seconds, message):
    folder = write(tmp_path, np.zeros(int(16_000 * seconds), np.float32))
    with pytest.raises(BadInputError, match=message):
        check(folder)


@pytest.mark.parametrize("limits", [{"most_recorded_s": 10.0}, {"least_recorded_s": 12.0}])
def test_a_recording_is_as_long_as_the_model_wants_it(recordings, limits):
    least_s, most_s = limits.get("least_recorded_s", 1.0), limits.get("most_recorded_s", 60.0)
    message = f"John.flac lasts 11.00 s, this model takes {least_s:g} to {most_s:g} s"
    with pytest.raises(BadInputError, match=message):
        check(recordings, **limits)


def test_a_recording_of_a_telephone_is_refused(tmp_path):
    sf.write(tmp_path / "ben.wav", np.zeros(16_000), 8_000)
    with pytest.raises(BadInputError, match=r"ben.wav: 1 channels at 8000 Hz: .* from 16000 to"):
        check(tmp_path)


def test_a_recording_without_speech_is_refused(tmp_path, recordings):
    check(recordings)
    noise = np.random.default_rng(1).normal(0, 0.05, 48_000)
    for silent in (np.zeros(48_000), noise):
        with pytest.raises(BadInputError, match=r"ben.wav: there is no speech in it"):
            check(write(tmp_path / "silent", silent))


def test_a_file_that_is_no_sound_is_refused_by_name(tmp_path):
    (tmp_path / "ben.wav").write_bytes(b"RIFF????WAVEno sound")
    with pytest.raises(BadInputError, match=r"--voices: .*ben.wav: The wav file has no "):
        check(tmp_path)


# --- prompts ---


def test_a_cloned_voice_has_a_position_of_its_own_and_no_language(checkpoint, recordings):
    talker = TTSTalker(checkpoint, voices=recordings)
    ids = talker._ids
    assert talker.voices == ("vivian", "eric", "John", "anna")
    codes = [tiny.TALKER[f"codec_{n}_id"] for n in ("nothink", "think_bos", "think_eos")]
    assert talker.response("anna", 7) == [
        *(ids.text + token for token in talker._role),
        *(ids.pad + code for code in codes),
        ids.audio + 1,
        ids.bos,
        ids.start + 7,
    ]
    assert talker.first_state_id == ids.audio + 2
    speaker = talker.make_voice(voice_files.read_recording(BOOK, RATE_HZ))
    [embedding] = speaker
    np.testing.assert_allclose(embedding, REFERENCE[BOOK.name], atol=2e-5)
    brought, place = talker.response_in(speaker, 7)
    [key] = {*brought} - {*talker.response("anna", 7)}
    assert brought[place] == key >= talker.first_state_id
    assert brought[:place] + brought[place + 1 :] == [
        token for token in talker.response("anna", 7) if token != ids.audio + 1
    ]
    assert talker.response_in(speaker + 1, 7)[0][place] != key
    with pytest.raises(BadInputError, match="another model made the voice"):
        talker.response_in(speaker[:, :-1], 7)
    with pytest.raises(BadInputError, match="voice 'nora' is not one of"):
        talker.response("nora", 7)


# --- models ---


def load(path: Path, recordings: Path | None, cache: Path):
    return ModelSource(path=str(path), recordings=recordings).load(cache)


def test_the_server_knows_the_voices_and_gives_the_folder_to_the_talker(
    checkpoint, recordings, tmp_path
):
    facts = load(checkpoint, recordings, tmp_path)
    assert facts.voices == ("vivian", "eric", "John", "anna")
    assert recordings_of("talker", facts) == str(recordings)
    assert recordings_of("vocoder", facts) == ""
    assert load(checkpoint, None, tmp_path).recordings is None


def test_a_base_checkpoint_needs_recordings(checkpoint, recordings, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(checkpoint, base)
    config = json.loads((base / "config.json").read_text())
    config["talker_config"] |= {"spk_id": {}, "spk_is_dialect": {}}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInputError, match=r"no voices of its own: .* --voices DIR"):
        load(base, None, tmp_path)
    assert load(base, recordings, tmp_path).voices == ("John", "anna")


def test_recordings_of_a_checkpoint_without_an_encoder_are_refused(recordings, tmp_path):
    preset = tiny.build(tmp_path / "preset")
    with pytest.raises(BadInputError, match=r"--voices: .*preset has no speaker encoder"):
        load(preset, recordings, tmp_path)
    with pytest.raises(BadInputError, match="--voices: demo has no speaker encoder"):
        ModelSource(path="demo", recordings=recordings).load(tmp_path)


@pytest.mark.parametrize(
    ("build", "made"),
    [
        (tiny_chatterbox.build, r"voices/NAME.pt, .*; recordings need ve.safetensors, and"),
        (tiny_turbo.build, r"voices/NAME.pt, .*; recordings need ve.safetensors"),
        (
            tiny_cosyvoice.build,
            r"spk2info.pt, .*; recordings need speech_tokenizer_v2.onnx and campplus.onnx",
        ),
    ],
)
def test_a_family_without_an_encoder_names_the_files_of_its_voices(
    build, made, recordings, tmp_path
):
    path = build(tmp_path / "other")
    for file in ("campplus.onnx", "ve.safetensors"):
        (path / file).unlink(missing_ok=True)
    with pytest.raises(BadInputError, match=f"no speaker encoder, .*; its own are those of {made}"):
        load(path, recordings, tmp_path)


def test_a_recording_does_not_replace_a_voice_of_the_checkpoint(checkpoint, recordings, tmp_path):
    shutil.copy(JFK, recordings / "Vivian.flac")
    with pytest.raises(BadInputError, match=r"Vivian.flac has the name of a voice of"):
        load(checkpoint, recordings, tmp_path)


def test_in_a_cascade_the_talker_takes_them_on(checkpoint, recordings, tmp_path):
    cascade = tiny_cascade.build(tmp_path / "cascade", checkpoint)
    spoken, alone = CASCADE.facts(cascade), model_facts(checkpoint)
    assert spoken.clones_voices == alone.clones_voices
    assert spoken.voice_rate_hz == alone.voice_rate_hz == RATE_HZ
    assert load_talker(cascade, voices=recordings).voices[2:] == ("John", "anna")
