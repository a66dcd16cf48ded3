"""Voices that Chatterbox and Turbo make of recordings, as their own code would write them."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile as sf
import torch
from safetensors.torch import load_file, save_file

from sglang_live.errors import BadInputError
from sglang_live.model_source import ModelSource
from sglang_live.models.chatterbox.decoder import ChatterboxDecoder
from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    DECODER_WEIGHTS,
    MEAN_WEIGHTS,
    SPEAKER_WEIGHTS,
    VOICE_FILE,
    VOICES_FOLDER,
)
from sglang_live.models.chatterbox.parts import ChatterboxTalker
from sglang_live.models.chatterbox_turbo.parts import TurboTalker
from sglang_live.models.codecs import END_CODE
from sglang_live.models.voice_files import read_recording
from sglang_live.preflight import check_recordings
from sglang_live.sound.loudness import loudness_db
from sglang_live.stage_specs import recordings_of
from test.chatterbox import checkpoint as tiny_chatterbox
from test.chatterbox import encoders
from test.chatterbox_turbo import checkpoint as tiny_turbo

AUDIO = Path(__file__).parents[2] / "data" / "audio"
SPEECH = "sp_jfk.flac", "sp_librivox_0880.flac"
TINY: dict[str, tuple[ModuleType, Any, str]] = {
    "chatterbox": (tiny_chatterbox, ChatterboxTalker, DECODER_WEIGHTS),
    "turbo": (tiny_turbo, TurboTalker, MEAN_WEIGHTS),
}


@pytest.fixture(scope="module", params=TINY)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, kind) -> Path:
    return TINY[kind][0].build(tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    return encoders.recordings(tmp_path_factory.mktemp("voices"))


# --- what the encoders hear: of chatterbox-tts 0.1.7 and s3tokenizer 0.3.0, with these weights ---


def nearly_all_equal(found: torch.Tensor, wanted: list[int]) -> None:
    """What float32 rounds in another order may be the next level of one value."""
    assert len(found) == len(wanted) and len(set(wanted)) > 50
    assert (found == torch.tensor(wanted)).float().mean() > 0.98


@pytest.mark.parametrize("name", SPEECH)
def test_what_t3_knows_is_what_the_reference_finds(path, kind, name):
    wanted = encoders.reference()[name]
    of_kind = ("turbo_speaker", "turbo_codes") if kind == "turbo" else ("speaker", "codes_6s")
    speaker, codes = (wanted[key] for key in of_kind)
    voice = RecordingEncoder(path).voice(read_recording(AUDIO / name, 24_000))
    torch.testing.assert_close(voice.speaker, torch.tensor(speaker), atol=2e-5, rtol=0)
    assert voice.speaker.std() > 0.1 and voice.emotion == 0.5
    nearly_all_equal(voice.codes, codes)


@pytest.mark.parametrize("name", SPEECH)
def test_what_the_flow_knows_is_what_the_reference_finds(tmp_path, name):
    path, wanted = tiny_chatterbox.build(tmp_path / "it"), encoders.reference()[name]
    codes, mel, speaker = RecordingEncoder(path).known(read_recording(AUDIO / name, 24_000))
    n = len(wanted["codes_10s"])
    # Of an odd number of columns the last one has no code.
    assert len(mel) // 2 == len(codes) and len(codes) in (n - 1, n)
    nearly_all_equal(codes, wanted["codes_10s"][: len(codes)])
    torch.testing.assert_close(speaker, torch.tensor(wanted["embedding"]), atol=2e-3, rtol=1e-3)
    assert speaker.std() > 1


@pytest.mark.parametrize("name", SPEECH)
def test_loudness_is_that_of_pyloudnorm(name):
    samples = read_recording(AUDIO / name, 24_000)
    assert loudness_db(samples, 24_000) == pytest.approx(
        encoders.reference()[name]["loudness"], abs=0.01
    )
    assert loudness_db(0.5 * samples, 24_000) - loudness_db(samples, 24_000) == pytest.approx(
        -6.02, abs=0.05
    )


def test_silence_has_no_loudness_and_what_is_soft_counts_little():
    rng = np.random.default_rng(1)
    loud = 0.1 * rng.standard_normal(48_000).astype(np.float32)
    assert loudness_db(np.zeros(48_000, np.float32), 24_000) == -np.inf
    with_pause = np.concatenate((loud, np.zeros(48_000, np.float32)))
    assert loudness_db(with_pause, 24_000) == pytest.approx(loudness_db(loud, 24_000), abs=0.5)


def test_turbo_hears_soft_and_loud_recordings_alike(tmp_path):
    path = tiny_turbo.build(tmp_path / "it")
    samples = read_recording(AUDIO / SPEECH[0], 24_000)
    found = [RecordingEncoder(path).speaker(np.float32(level) * samples) for level in (0.9, 0.1)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


# --- what is made of it ---


def test_a_recording_is_the_voice_that_the_reference_would_have_written(
    path, kind, recordings, tmp_path
):
    """Its prompt and its sound are those of a file with the same contents."""
    tiny, talker, _ = TINY[kind]
    written = tiny.build(tmp_path / "written")
    samples = read_recording(recordings / f"{encoders.CLARA}.wav", 24_000)
    codes, mel, speaker = RecordingEncoder(path).known(samples)
    of_flow = {"prompt_token": codes[None], "prompt_feat": mel[None], "embedding": speaker[None]}
    (written / VOICES_FOLDER / "clara.pt").unlink(missing_ok=True)
    entry = {"t3": tiny.recorded(path, samples), "gen": of_flow}
    torch.save(entry, written / VOICES_FOLDER / f"{encoders.CLARA}.pt")
    talkers = talker(path, recordings), talker(written)
    assert talkers[0].voices == talkers[1].voices == ("default", "anna", "clara")
    prompts = [each.prompt("clara", "Hi.") for each in talkers]
    assert prompts[0] == prompts[1]
    said = torch.cat((torch.randint(0, 6561, (9, 1)), torch.full((1, 1), END_CODE)))
    waves = []
    for decoder in (
        ChatterboxDecoder.from_pretrained(path, "cpu", torch.float32, voices=recordings),
        ChatterboxDecoder.from_pretrained(written, "cpu", torch.float32),
    ):
        [wave] = decoder.decode([decoder.new_stream("clara")], [said])
        waves.append(wave)
    assert len(waves[0]) >= 9 * 960 and waves[0].std() > 1e-3
    torch.testing.assert_close(*waves)


@pytest.mark.parametrize(
    ("file", "lost"),
    [
        (SPEAKER_WEIGHTS, "lstm.weight_hh_l1"),
        ("", "tokenizer.encoder.blocks.1.attn.key.weight"),
        ("", "speaker_encoder.xvector.dense.linear.weight"),
    ],
)
def test_an_encoder_that_lacks_a_weight_is_refused(file, lost, kind, recordings, tmp_path):
    path = TINY[kind][0].build(tmp_path / "it")
    file = file or TINY[kind][2]
    tensors = load_file(path / file)
    del tensors[lost]
    save_file(tensors, path / file)
    encoder = RecordingEncoder(path)
    clara = read_recording(recordings / f"{encoders.CLARA}.wav", 24_000)
    with pytest.raises(BadInputError, match=f"{file} has no encoder of Chatterbox"):
        encoder.voice(clara)
        encoder.known(clara)


# --- voices that a response brings along ---


@pytest.fixture(scope="module")
def clara(recordings):
    return read_recording(recordings / f"{encoders.CLARA}.wav", 24_000)


def test_a_voice_that_is_brought_along_sounds_as_the_one_of_a_recording(
    path, kind, recordings, clara
):
    speaker = TINY[kind][1](path).make_voice(clara)
    assert speaker.dtype == np.float32 and speaker.ndim == 1
    decoder = ChatterboxDecoder.from_pretrained(path, "cpu", torch.float32, voices=recordings)
    codes = torch.cat((torch.randint(0, 6561, (9, 1)), torch.full((1, 1), END_CODE)))
    streams = decoder.new_stream("clara"), decoder.new_stream("voice_1", speaker)
    waves = decoder.decode(list(streams), [codes, codes])
    assert waves[0].std() > 1e-3
    torch.testing.assert_close(*waves)


def test_its_prompt_is_that_of_the_recording_but_for_its_rows(path, kind, recordings, clara):
    talker = TINY[kind][1](path, recordings)
    speaker = talker.make_voice(clara)
    brought, known = talker.prompt_in(speaker, "Hi."), talker.prompt("clara", "Hi.")
    n_rows = len(brought.rows)
    assert n_rows == (1 if kind == "turbo" else tiny_chatterbox.N_ROWS)
    assert brought.ids[n_rows:] == known[n_rows:]
    assert {*brought.ids[:n_rows]}.isdisjoint(known), "no other voice has them"
    assert len({*brought.ids[:n_rows]}) == n_rows
    assert talker.prompt_in(speaker, "Hi.").ids == brought.ids
    other = talker.prompt_in(talker.make_voice(clara[:48_000]), "Hi.")
    assert {*other.ids[:n_rows]}.isdisjoint(brought.ids)


@pytest.mark.parametrize(
    "values",
    [[], [0, 0], [-1, 1, 1], [np.nan] * 4, [np.inf] * 4, [2, 1, 1], [3, 1, 1, 1, 7], [9e5, 1]],
)
def test_a_voice_of_another_model_is_refused(path, kind, values):
    speaker = np.array(values, np.float32)
    with pytest.raises(BadInputError, match="another model made the voice"):
        TINY[kind][1](path).prompt_in(speaker, "Hi.")
    decoder = ChatterboxDecoder.from_pretrained(path, "cpu", torch.float32)
    with pytest.raises(BadInputError, match="another model made the voice"):
        decoder.new_stream("voice_1", speaker)


def test_codes_that_turbo_lacks_are_refused(tmp_path, clara):
    talker = TurboTalker(tiny_turbo.build(tmp_path / "it"))
    speaker = talker.make_voice(clara)
    n_of_t3 = int(speaker[0])
    for code in (6561, -1, np.nan):
        wrong = speaker.copy()
        wrong[n_of_t3] = code
        with pytest.raises(BadInputError, match="another model made the voice"):
            talker.prompt_in(wrong, "Hi.")


# --- the server ---


def test_a_checkpoint_with_its_encoders_takes_on_recordings_in_both_stages(
    path, recordings, tmp_path
):
    facts = ModelSource(path=str(path), recordings=recordings).load(tmp_path)
    assert facts.voices == ("default", "anna", "clara") and not facts.voices_need_words
    for stage in ("talker", "vocoder"):
        assert recordings_of(stage, facts) == str(recordings)


def test_a_checkpoint_without_voices_needs_recordings(kind, recordings, tmp_path):
    tiny, talker, _ = TINY[kind]
    path = tiny.build(tmp_path / "it")
    (path / VOICE_FILE).unlink()
    (path / VOICES_FOLDER / "anna.pt").unlink()
    with pytest.raises(BadInputError, match=r"no voices of its own: .* --voices DIR"):
        ModelSource(path=str(path)).load(tmp_path)
    assert ModelSource(path=str(path), recordings=recordings).load(tmp_path).voices == ("clara",)
    assert talker(path, recordings).voices == ("clara",)


def test_turbo_wants_five_seconds(path, kind, tmp_path):
    folder = tmp_path / "voices"
    folder.mkdir()
    (folder / "book.flac").write_bytes((AUDIO / SPEECH[1]).read_bytes())
    facts = ModelSource(path=str(path), recordings=folder).load(tmp_path / "cache")
    if kind == "turbo":
        with pytest.raises(BadInputError, match=r"book.flac lasts 2.99 s, this model takes 5 to"):
            check_recordings(facts)
    else:
        check_recordings(facts)
        assert len(RecordingEncoder(path).codes(read_recording(folder / "book.flac", 24_000))) == 75


@pytest.mark.parametrize(
    ("samples", "rate_hz", "message"),
    [
        (0.05 * np.random.default_rng(1).standard_normal(96_000), 16_000, "there is no speech"),
        (np.zeros(600 * 16_000, np.float32), 16_000, "longer than 60 s"),
        (np.zeros(48_000, np.float32), 8_000, "8000 Hz"),
    ],
)
def test_what_is_no_voice_is_refused_before_a_stage_starts(
    path, samples, rate_hz, message, tmp_path
):
    folder = tmp_path / "voices"
    folder.mkdir()
    sf.write(folder / "ben.wav", samples, rate_hz)
    facts = ModelSource(path=str(path), recordings=folder).load(tmp_path / "cache")
    with pytest.raises(BadInputError, match=rf"--voices: .*ben.wav.*{message}"):
        check_recordings(facts)
