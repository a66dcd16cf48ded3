"""Piper's files, what its network is given, and phonemes of English and of other languages."""

import json
import stat

import numpy as np
import pytest

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.phoneme_voice import Phoneme, Word, open_onnx
from sglang_live.models.piper import (
    EnglishAsEspeak,
    EspeakReader,
    PiperNetwork,
    PiperVoice,
    as_espeak,
    piper_files,
    style_of,
)
from sglang_live.models.speech_kinds import find_voice
from sglang_live.speakable.words import wording_of
from test.unit.models.tiny_voices import (
    PIPER_ALPHABET,
    PIPER_RATE_HZ,
    PIPER_SAMPLES,
    piper_wave,
    write_piper,
)

# Answers as the program does, with the letters of the clause, and fails for an unknown language.
FAKE_ESPEAK = """#!/bin/sh
case "$*" in *" xx "*) echo "unknown voice" >&2; exit 1;; esac
sed -e 's/[.,?]//g' -e 's/2/(en)tu(de) zwei/'
"""


@pytest.fixture
def fake_espeak(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "espeak-ng"
    path.parent.mkdir()
    path.write_text(FAKE_ESPEAK)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")


def ids_of(text: str) -> list[int]:
    ids = [1, 0]
    for sign in text:
        ids += [*PIPER_ALPHABET[sign], 0]
    return [*ids, 2]


def network(path) -> PiperNetwork:
    return PiperNetwork(open_onnx(path, ("input",), 1), piper_files(path))


def phonemes(text: str) -> list[Phoneme]:
    return [Phoneme(sign, 0) for sign in text]


def written(signs: list[Phoneme]) -> str:
    return "".join(sign.sign for sign in signs)


def test_a_file_or_its_directory_is_a_voice(tmp_path):
    path = write_piper(tmp_path / "en_US-tiny-low.onnx")
    for given in (path, tmp_path):
        found = find_voice(str(given))
        assert found.offers == ("tiny",)
        # English phonemes come from a package.
        assert [package.name for package in found.packages.values()] == ["hibari-tts"]


def test_speakers_are_voices_in_the_order_of_their_numbers(tmp_path):
    write_piper(tmp_path / "many.onnx", speakers={"p2": 1, "p1": 0, "p3": 2})
    assert find_voice(str(tmp_path)).offers == ("p1", "p2", "p3")


def test_the_network_is_given_ids_with_pads_the_scales_and_the_speaker(tmp_path):
    path = write_piper(tmp_path / "many.onnx", speakers={"p1": 0, "p2": 1})
    wave, ends = network(path).speak(phonemes("həlˈoʊ."), "p2")
    np.testing.assert_allclose(wave, piper_wave(ids_of("həlˈoʊ."), 1.25, 1), rtol=1e-5)
    assert len(ends) == 7 and (np.diff(ends) >= 0).all() and ends[-1] <= len(wave)


def test_exported_durations_tell_where_phonemes_end(tmp_path):
    path = write_piper(tmp_path / "one.onnx", durations=True)
    wave, ends = network(path).speak(phonemes("həl"), "tiny")
    ids = ids_of("həl")
    assert len(wave) == len(ids) * PIPER_SAMPLES
    # The tiny network says that each id takes as long as its number.
    sums = np.cumsum(ids)
    np.testing.assert_allclose(ends, (sums / sums[-1] * len(wave))[[3, 5, 7]], atol=1)


def test_a_voice_of_characters_needs_nothing_else_and_has_its_own_rate(tmp_path):
    path = write_piper(tmp_path / "de.onnx", phonemes="text", language="de")
    assert find_voice(str(path)).packages == {}
    voice = PiperVoice.load(path)
    assert voice.sample_rate_hz == PIPER_RATE_HZ
    # Ü is u and a mark; what the network does not know makes no sound.
    speech = voice.synthesise("Üben, bitte. 日本", "tiny")
    expected = piper_wave(ids_of("u\u0308ben, bitte."), 1.25, 0)
    assert speech.pcm.tolist() == (np.clip(expected, -1, 1) * 32767).astype(np.int16).tolist()
    assert [word.end for word in speech.words] == [5, 12, 15]
    assert len(voice.synthesise("日本", "tiny").pcm) == 0


@pytest.mark.parametrize(
    ("misaki", "espeak"),
    [
        ("həlˈO wˈɜɹld.", "həlˈoʊ wˈɜːld."),
        ("ˈizi", "ˈiːzi"),
        ("ʤˈʌmp", "dʒˈʌmp"),
        ("ʧˈIld", "tʃˈaɪld"),
        ("bˈʌTəɹ", "bˈʌɾɚ"),
        ("hˈɜɹi", "hˈɜːɹi"),
        ("mˈOTəɹɪŋ", "mˈoʊɾɚɹɪŋ"),
        ("kˈɑɹ", "kˈɑːɹ"),
        ("bˈY ænd nˈW", "bˈɔɪ ænd nˈaʊ"),
        ("ðə mˈɑdᵊl", "ðə mˈɑːdəl"),
        ("əɹ", "ɚ"),
        ("ɜɹˈA", "ɜːɹˈeɪ"),
    ],
)
def test_english_phonemes_are_written_as_espeak_does(misaki, espeak):
    assert written(as_espeak(phonemes(misaki))) == espeak


def test_english_phonemes_keep_their_words_and_unknown_ones_make_no_sound():
    class FakeReader:
        def read(self, text):
            first = [Phoneme("A", 4), Phoneme("Q", 5), Phoneme("“", 5)]
            return [Word("a", 1)], [first, [Phoneme("z", 6), Phoneme(".", 6)]]

    _, [sentence] = EnglishAsEspeak(FakeReader(), "eɪə.").read("a")
    assert sentence == [Phoneme(*pair) for pair in (("e", 4), ("ɪ", 4), ("ə", 5))]


def test_other_languages_are_read_by_the_program_clause_by_clause(fake_espeak):
    text = "eins, 2 drei. vier"
    words, sentences = EspeakReader("de", PIPER_ALPHABET).read(text)
    assert [word.end for word in words] == [5, 7, 13, 18]
    assert [written(sentence) for sentence in sentences] == ["eins, tu zwei drei. ", "vier "]
    assert [phoneme.word for phoneme in sentences[0]] == [0] * 6 + [1] * 3 + [1] * 5 + [2] * 6


def test_a_program_that_fails_says_why(fake_espeak):
    with pytest.raises(LiveError, match="espeak-ng failed for xx: unknown voice"):
        EspeakReader("xx", PIPER_ALPHABET).read("eins")


def test_without_the_program_another_language_is_refused_by_its_name(tmp_path, monkeypatch):
    path = write_piper(tmp_path / "de.onnx", language="de")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInputError, match=r"speaks de, .*espeak-ng, which is not installed"):
        find_voice(str(path))


def test_several_voices_in_a_directory_are_refused_with_their_names(tmp_path):
    for name in ("a.onnx", "b.onnx"):
        write_piper(tmp_path / name)
    with pytest.raises(BadInputError, match=r"give the path of one: a.onnx, b.onnx"):
        find_voice(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio": {}}, "lacks 'sample_rate'"),
        ({"audio": {"sample_rate": "fast"}}, "is broken"),
        ({"phoneme_id_map": {"a": [1]}}, r"phoneme_id_map has no '\^'"),
        ({"phoneme_type": "pinyin"}, "type 'pinyin' are not supported"),
        ({"espeak": None}, "is broken"),
    ],
)
def test_broken_settings_are_refused_by_name(tmp_path, change, message):
    path = write_piper(tmp_path / "one.onnx")
    settings = tmp_path / "one.onnx.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(BadInputError, match=rf"one.onnx.json .*{message}"):
        find_voice(str(path))


def test_a_voice_is_given_only_letters_of_its_scripts_and_figures_that_it_reads_itself():
    german = wording_of("Er kostet 3,50 € und 20 %. Привет!", style_of("de"))
    assert (german.words, german.n_unspeakable) == ("Er kostet 3,50 € und 20 %!", 6)
    assert wording_of("Привет, world!", style_of("ru")).words == "Привет, world!"
    assert wording_of("It costs $3.", style_of("en-us")).words == "It costs three dollars."
    assert wording_of("नमस्ते। 5", style_of("hi")).words == "नमस्ते. 5."
    assert wording_of("東京です。", style_of("ja")).words == "東京です."
    assert wording_of("كيف حالك؟", style_of("ar")).words == "كيف حالك?"
