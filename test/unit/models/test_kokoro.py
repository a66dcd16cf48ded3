"""Kokoro's files in their published forms, and what its network is given."""

import json

import numpy as np
import pytest
from onnx import TensorProto

from sglang_live.errors import BadInputError
from sglang_live.models.kokoro import KokoroNetwork, kokoro_files
from sglang_live.models.packages import KOKORO_PARTS
from sglang_live.models.phoneme_voice import Phoneme, open_onnx
from sglang_live.models.speech_kinds import find_voice
from test.unit.models.tiny_voices import (
    KOKORO_SAMPLES,
    kokoro_durations,
    kokoro_styles,
    kokoro_wave,
    write_kokoro,
)

FLOAT, INT32 = TensorProto.FLOAT, TensorProto.INT32
ALPHABET = {"h": 50, "ə": 83, "l": 54, "ˈ": 156, "O": 31, " ": 16, ".": 4}
HELLO = [Phoneme(sign, 0) for sign in "həlˈO."]
IDS = [0, 50, 83, 54, 156, 31, 4, 0]


def write_separate(root, *names) -> None:
    """A directory as onnx-community publishes it."""
    write_kokoro(root / "onnx" / "model.onnx")
    (root / "voices").mkdir()
    for seed, name in enumerate(names):
        kokoro_styles(seed).tofile(root / "voices" / f"{name}.bin")


def write_joined(root, *names) -> None:
    """A file beside one with all voices."""
    write_kokoro(root / "kokoro-v1.0.onnx")
    styles = {name: kokoro_styles(seed) for seed, name in enumerate(names)}
    with (root / "voices-v1.0.bin").open("wb") as file:
        np.savez(file, **styles)


def network(path, **styles) -> KokoroNetwork:
    given = {name: values.reshape(-1, 256) for name, values in styles.items()}
    return KokoroNetwork(open_onnx(path, ("style", "speed"), 1), ALPHABET, given)


@pytest.mark.parametrize("write", [write_separate, write_joined])
def test_a_directory_is_a_voice_with_its_english_voices(tmp_path, write):
    write(tmp_path, "am_adam", "af_heart", "jf_alpha", "bf_emma", "mine")
    found = find_voice(str(tmp_path))
    assert found.offers == ("af_heart", "am_adam", "bf_emma", "mine")
    styles = kokoro_files(tmp_path).styles()
    np.testing.assert_array_equal(styles["af_heart"], kokoro_styles(1).reshape(-1, 256))


def test_the_packaged_voices_are_known_before_a_download():
    found = find_voice("kokoro")
    assert len(found.offers) == 28 and found.offers[0] == "af_heart"
    assert list(found.packages) == ["english", *(part.name for part in KOKORO_PARTS)]


def test_a_network_is_read_from_its_parts(tmp_path):
    write_kokoro(tmp_path / "model.onnx")
    whole = (tmp_path / "model.onnx").read_bytes()
    session = open_onnx(whole, ("style", "speed"), 1)
    assert {given.name for given in session.get_inputs()} >= {"style", "speed"}
    with pytest.raises(BadInputError, match=f"cannot read {len(whole) - 9} bytes"):
        open_onnx(whole[:-9], ("style", "speed"), 1)


def test_one_of_several_networks_is_named_by_its_path(tmp_path):
    write_separate(tmp_path, "af_heart")
    (tmp_path / "onnx" / "model.onnx").rename(tmp_path / "onnx" / "model_q8.onnx")
    assert kokoro_files(tmp_path).model.name == "model_q8.onnx"
    chosen = write_kokoro(tmp_path / "onnx" / "model_fp16.onnx")
    with pytest.raises(BadInputError, match=r"several networks.*onnx/model_fp16.onnx"):
        find_voice(str(tmp_path))
    assert find_voice(str(chosen)).offers == ("af_heart",)
    assert kokoro_files(chosen).model == chosen
    write_kokoro(tmp_path / "onnx" / "model.onnx")
    assert kokoro_files(tmp_path).model.name == "model.onnx"


@pytest.mark.parametrize(
    ("ids", "speed_type"),
    [
        ("input_ids", TensorProto.FLOAT),
        ("tokens", TensorProto.FLOAT),
        ("tokens", TensorProto.INT32),
    ],
)
def test_the_network_is_given_padded_ids_and_the_style_of_their_number(tmp_path, ids, speed_type):
    path = write_kokoro(tmp_path / "model.onnx", ids=ids, speed=speed_type)
    styles = kokoro_styles(7)
    wave, ends = network(path, heart=styles).speak(HELLO, "heart")
    np.testing.assert_allclose(wave, kokoro_wave(IDS, styles[len(HELLO) - 1]), rtol=1e-5)
    assert len(ends) == len(HELLO) and (np.diff(ends) >= 0).all()
    assert ends[0] > 0 and ends[-1] <= len(wave)


def test_a_voice_with_few_styles_has_its_last_one_for_long_texts(tmp_path):
    styles = kokoro_styles(7, n=3)
    wave, _ = network(write_kokoro(tmp_path / "model.onnx"), heart=styles).speak(HELLO, "heart")
    np.testing.assert_allclose(wave, kokoro_wave(IDS, styles[2]), rtol=1e-5)


def test_exported_durations_tell_where_phonemes_end(tmp_path):
    path = write_kokoro(tmp_path / "model.onnx", durations=True)
    wave, ends = network(path, heart=kokoro_styles(7)).speak(HELLO, "heart")
    assert len(wave) == len(IDS) * KOKORO_SAMPLES
    sums = np.cumsum(kokoro_durations()[IDS])
    np.testing.assert_allclose(ends, (sums / sums[-1] * len(wave))[1:-1], atol=1)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_the_directorys_own_alphabet_is_used(tmp_path, name):
    write_separate(tmp_path, "af_heart")
    vocab = {"$": 0, "a": 9, "b": 3}
    document = {"model": {"vocab": vocab}} if name == "tokenizer.json" else {"vocab": vocab}
    (tmp_path / name).write_text(json.dumps(document))
    assert kokoro_files(tmp_path).alphabet == vocab
    (tmp_path / name).write_text("{")
    with pytest.raises(BadInputError, match=f"{name} is broken"):
        find_voice(str(tmp_path))


def test_voices_of_other_languages_alone_are_refused(tmp_path):
    write_separate(tmp_path, "jf_alpha", "zf_xiaobei")
    with pytest.raises(BadInputError, match="no English voice but jf_alpha, zf_xiaobei"):
        find_voice(str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"x" * 1000, b"PK\x03\x04broken"])
def test_broken_voices_are_refused_by_name(tmp_path, data):
    write_joined(tmp_path, "af_heart")
    (tmp_path / "voices-v1.0.bin").write_bytes(data)
    with pytest.raises(BadInputError, match=r"voices-v1.0.bin has no voices of Kokoro"):
        find_voice(str(tmp_path))


def test_a_network_without_voices_is_none(tmp_path):
    write_kokoro(tmp_path / "model.onnx")
    with pytest.raises(BadInputError, match=r"is no voice: looked for Kokoro \(model.onnx.*Piper"):
        find_voice(str(tmp_path))


@pytest.mark.parametrize("data", [b"", b"not a network", None])
def test_a_broken_network_is_refused_by_name(tmp_path, data):
    path = write_kokoro(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:2000] if data is None else data)
    with pytest.raises(BadInputError, match=r"onnxruntime cannot read .*model.onnx"):
        open_onnx(path, ("style", "speed"), 1)


def test_another_network_is_refused_with_the_inputs_that_it_lacks(tmp_path):
    path = write_kokoro(tmp_path / "model.onnx")
    with pytest.raises(BadInputError, match="input_ids, style, speed, without scales"):
        open_onnx(path, ("scales",), 1)
