"""Whisper through CTranslate2, against transformers with the same random weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models import whisper
from sglang_live.models.speech_kinds import find_recogniser
from sglang_live.models.utterances import utterances
from sglang_live.models.whisper import (
    END,
    MIN_TOKENS,
    TRANSCRIBE,
    TRANSLATE,
    Vocabulary,
    WhisperRecogniser,
    byte_characters,
)
from test.unit.models.tiny_whisper import LANGUAGES, build

AUDIO = Path(__file__).parents[2] / "data" / "audio"
RECORDINGS = ("sp_jfk.flac", "sp_librivox_0880.flac", "sp_cv651325.flac", "no_humpback_6s.flac")


def recording(name: str) -> np.ndarray:
    pcm, rate_hz = sf.read(AUDIO / name, dtype="int16")
    assert rate_hz == INPUT_RATE_HZ
    return pcm


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def converted(directories) -> Path:
    return directories[1]


class Reference:
    """Greedy decoding in transformers."""

    def __init__(self, directory: Path):
        self.model = WhisperForConditionalGeneration.from_pretrained(directory).eval()
        self.processor = WhisperProcessor.from_pretrained(directory)

    def features(self, pcm: np.ndarray) -> torch.Tensor:
        given = self.processor(pcm / 32768, sampling_rate=INPUT_RATE_HZ, return_tensors="pt")
        return given.input_features

    def ids(self, pcm: np.ndarray, n_tokens: int, **settings) -> list[int]:
        with torch.no_grad():
            found = self.model.generate(
                self.features(pcm), max_new_tokens=n_tokens, do_sample=False, **settings
            )
        end = self.model.generation_config.eos_token_id
        return [token for token in found[0].tolist() if token < end]

    def language(self, pcm: np.ndarray) -> str:
        [token] = self.model.detect_language(self.features(pcm))
        return self.processor.tokenizer.convert_ids_to_tokens(int(token)).strip("<|>")


@pytest.fixture(scope="module")
def reference(directories) -> Reference:
    return Reference(directories[0])


@pytest.mark.parametrize("name", RECORDINGS)
def test_greedy_tokens_equal_those_of_transformers(converted, reference, name):
    recogniser = WhisperRecogniser.load(converted, language="de")
    pcm = recording(name)
    prompt = recogniser._prompt("de", TRANSCRIBE)
    ids = recogniser._decode(recogniser._encoded(pcm), prompt, len(pcm))
    expected = reference.ids(pcm, 60, language="de", task="transcribe")
    assert ids[:60] == expected[: len(ids)]
    assert len(ids) >= MIN_TOKENS // 2 and len(set(ids)) > 4
    text = recogniser._vocabulary.text(ids[:60])
    assert text == reference.processor.tokenizer.decode(expected[: len(ids)]).replace("\ufffd", "")


@pytest.mark.parametrize("task", ["transcribe", "translate"])
@pytest.mark.parametrize("name", RECORDINGS[:3])
def test_the_probability_of_each_token_equals_that_of_transformers(
    converted, reference, name, task
):
    recogniser = WhisperRecogniser.load(converted, language="de")
    pcm = recording(name)
    heard = recogniser.transcribe_in_detail(pcm, translates=task == "translate")
    prompt = recogniser._prompt("de", TRANSLATE if task == "translate" else TRANSCRIBE)
    ids = recogniser._decode(recogniser._encoded(pcm), prompt, len(pcm))
    assert b"".join(t.piece for t in heard) == b"".join(recogniser._vocabulary.pieces(ids))
    with torch.no_grad():
        logits = reference.model(
            reference.features(pcm), decoder_input_ids=torch.tensor([[*prompt, *ids]])
        ).logits[0, len(prompt) - 1 : -1, : recogniser._vocabulary.id_of(END)]
    wanted = torch.log_softmax(logits.double(), -1)[range(len(ids)), ids]
    assert [t.logprob for t in heard] == pytest.approx(wanted.tolist(), abs=0.02)


@pytest.mark.parametrize("name", RECORDINGS[:3])
def test_tokens_follow_one_another_within_the_sound(converted, name):
    recogniser = WhisperRecogniser.load(converted, language="de")
    pcm = np.concatenate([recording(name)] * 4)
    heard = recogniser.transcribe_in_detail(pcm, translates=False)
    times = [at_s for token in heard for at_s in (token.begin_s, token.end_s)]
    assert times == sorted(times) and 0 <= times[0] < times[-1] <= len(pcm) / INPUT_RATE_HZ + 0.02
    text = b"".join(token.piece for token in heard).decode(errors="ignore")
    assert "".join(text.split()) == "".join(recogniser.transcribe(pcm).split())


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_detected_language_equals_that_of_transformers(converted, reference, name):
    recogniser = WhisperRecogniser.load(converted)
    pcm = recording(name)
    assert recogniser._detected(recogniser._encoded(pcm)) == reference.language(pcm)


def test_a_model_of_english_alone_is_not_asked_for_a_language(tmp_path):
    plain, converted = build(tmp_path, is_multilingual=False)
    pcm = recording("sp_jfk.flac")
    recogniser = WhisperRecogniser.load(converted)
    encoded = recogniser._encoded(pcm)
    assert recogniser._detected(encoded) == "en"
    ids = recogniser._decode(encoded, recogniser._prompt("en", TRANSCRIBE), len(pcm))
    assert ids[:60] == Reference(plain).ids(pcm, 60)[: len(ids)]
    assert find_recogniser(str(converted), "").offers == ("en",)


def test_long_audio_is_heard_in_pieces_of_which_none_is_lost(converted):
    recogniser = WhisperRecogniser.load(converted, language="en")
    pcm = np.concatenate([recording("sp_jfk.flac")] * 6)
    pieces = utterances(pcm)
    assert len(pieces) > 2 and np.array_equal(np.concatenate(pieces), pcm)
    whole = recogniser.transcribe(pcm)
    assert whole == " ".join(text for piece in pieces if (text := recogniser.transcribe(piece)))
    # Japanese is written without spaces.
    unspaced = WhisperRecogniser.load(converted, language="ja")
    assert unspaced.transcribe(pcm) == "".join(map(unspaced.transcribe, pieces))


@pytest.mark.parametrize("pcm", [np.zeros(0, np.int16), np.ones(100, np.int16), np.zeros(32_000)])
def test_what_cannot_hold_a_word_is_not_given_to_the_model(pcm):
    recogniser = WhisperRecogniser(None, None, None, "en")
    assert recogniser.transcribe(pcm.astype(np.int16)) == ""


def test_a_directory_is_a_recogniser_of_its_languages(converted):
    found = find_recogniser(str(converted), "de")
    assert found.path == converted and found.offers == LANGUAGES
    with pytest.raises(BadInputError, match="language 'fr'; it knows en, de, ja"):
        find_recogniser(str(converted), "fr")


def test_a_directory_of_something_else_is_refused_with_what_was_looked_for(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInputError, match=r"looked for Whisper for CTranslate2 \(model.bin"):
        find_recogniser(str(tmp_path), "")


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (None, r"has no vocabulary.json or vocabulary.txt"),
        ("{", "vocabulary.json"),
        (json.dumps(["a", "<|endoftext|>"]), "lacks <|startoftranscript|>"),
    ],
)
def test_a_broken_vocabulary_is_refused(tmp_path, vocabulary, message):
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_text(json.dumps({"suppress_ids": []}))
    if vocabulary is not None:
        (tmp_path / "vocabulary.json").write_text(vocabulary)
    with pytest.raises(BadInputError, match=message.replace("|", r"\|")):
        find_recogniser(str(tmp_path), "")


def test_broken_weights_are_refused_by_name(converted, tmp_path):
    for file in converted.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:1000] if file.name == "model.bin" else data)
    with pytest.raises(BadInputError, match="CTranslate2 cannot read"):
        WhisperRecogniser.load(tmp_path)


@pytest.mark.parametrize("ending", ["", "\n"])
def test_older_models_have_their_vocabulary_in_lines(converted, tmp_path, ending):
    tokens = json.loads((converted / "vocabulary.json").read_text())
    (tmp_path / "vocabulary.txt").write_text("\n".join(tokens) + ending)
    assert Vocabulary.load(tmp_path).languages == LANGUAGES
    (tmp_path / "vocabulary.txt").write_text("\n".join(filter(None, tokens)) + ending)
    assert Vocabulary.load(tmp_path).languages == ()


def test_without_ctranslate2_the_extra_is_named(converted, monkeypatch):
    monkeypatch.setattr(whisper, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"pip install 'sglang-live\[whisper\]'"):
        find_recogniser(str(converted), "")


def test_characters_that_a_limit_has_cut_are_left_out(converted):
    vocabulary = Vocabulary.load(converted)
    ids = [vocabulary.id_of(sign) for sign in byte_characters()]
    written = "naïve 日本".encode()
    text = vocabulary.text([ids[byte] for byte in written[:-1]])
    assert text == "naïve 日"
