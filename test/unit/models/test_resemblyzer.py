"""The speaker encoder computes what its authors' network does, with weights from their file."""

import io
import pickle

import numpy as np
import pytest
import torch
from transformers.audio_utils import mel_filter_bank

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.resemblyzer import EMBEDDING, FILE, SpeakerEncoder, read_weights

PCM = (8000 * np.random.default_rng(1).standard_normal(INPUT_RATE_HZ)).clip(-32768, 32767)
PCM = PCM.astype(np.int16)


class Reference(torch.nn.Module):
    """As github.com/resemble-ai/Resemblyzer describes it, with torch's own LSTM and transform."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(40, EMBEDDING, 3, batch_first=True)
        self.linear = torch.nn.Linear(EMBEDDING, EMBEDDING)

    @torch.no_grad()
    def embed(self, pcm: np.ndarray) -> np.ndarray:
        sound = torch.from_numpy(pcm / 32768).float()
        sound *= 10 ** (-25 / 20) / sound.square().mean().sqrt()
        window = torch.hann_window(400)
        spectrum = torch.stft(
            sound, 400, 160, window=window, pad_mode="constant", return_complex=True
        )
        bands = mel_filter_bank(
            201, 40, 0.0, 8000.0, INPUT_RATE_HZ, norm="slaney", mel_scale="slaney"
        )
        mels = spectrum.abs().square().T @ torch.from_numpy(bands).float()
        _, (hidden, _) = self.lstm(mels[None])
        embedding = torch.relu(self.linear(hidden[-1]))[0]
        return (embedding / embedding.norm()).numpy()


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(4)
    return Reference().eval()


@pytest.fixture(scope="module")
def directory(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resemblyzer")
    (folder / FILE).parent.mkdir()
    state = {**reference.state_dict(), "similarity_weight": torch.ones(1)}
    checkpoint = {"step": 7, "model_state": state, "optimizer_state": {"lr": 1e-4}}
    torch.save(checkpoint, folder / FILE, _use_new_zipfile_serialization=False)
    return folder


@pytest.fixture(scope="module")
def encoder(directory):
    return SpeakerEncoder.load(directory)


def test_weights_are_read_without_torch(directory, reference):
    weights = read_weights(directory / FILE, "model_state")
    assert weights.keys() == {*reference.state_dict(), "similarity_weight"}
    for name, tensor in reference.state_dict().items():
        np.testing.assert_array_equal(weights[name], tensor.numpy())


@pytest.mark.parametrize("n", [4096, 7680, 16_000])
def test_embeddings_are_those_of_the_reference(encoder, reference, n):
    [[embedding]] = encoder.embed([PCM[:n]])
    np.testing.assert_allclose(embedding, reference.embed(PCM[:n]), atol=1e-6)
    assert np.linalg.norm(embedding) == pytest.approx(1)


def test_several_sounds_at_once_are_embedded_as_alone(encoder):
    sounds = [PCM[:8000], PCM[8000:]]
    [together] = encoder.embed(sounds)
    for sound, embedding in zip(sounds, together, strict=True):
        np.testing.assert_allclose(embedding, encoder.embed([sound])[0, 0], atol=1e-6)


def test_a_beginning_is_embedded_as_alone_but_for_its_level_and_its_last_frame(encoder):
    [[beginning], [whole]] = encoder.embed([PCM], [8000, len(PCM)])
    assert beginning @ encoder.embed([PCM[:8000]])[0, 0] > 0.999
    np.testing.assert_allclose(whole, encoder.embed([PCM])[0, 0], atol=1e-6)


def test_the_level_does_not_matter(encoder):
    [[softer]] = encoder.embed([(PCM / 8).astype(np.int16)])
    assert softer @ encoder.embed([PCM])[0, 0] > 0.9999


@pytest.mark.parametrize("sound", [np.zeros(8000), np.zeros(1), np.full(8000, -32768)])
def test_silence_and_clipping_have_an_embedding(encoder, sound):
    assert np.isfinite(encoder.embed([sound.astype(np.int16)])).all()


class Evil:
    def __reduce__(self):
        return (print, ("code of a checkpoint ran",))


def broken_files(good: bytes) -> dict[str, bytes]:
    new_format = io.BytesIO()
    torch.save({"model_state": {"a": torch.ones(2)}}, new_format)
    at = good.index(b"model_state")
    return {
        "empty": b"",
        "text": b"not a checkpoint",
        "cut in a pickle": good[:200],
        "cut in a storage": good[:-1000],
        "another part": good.replace(b"model_state", b"medol_state"),
        "another number": pickle.dumps(7),
        "code": good[:at] + pickle.dumps(Evil(), protocol=2) + good[at:],
        "code first": pickle.dumps(Evil(), protocol=2) + good,
        "the newer format": new_format.getvalue(),
    }


def test_a_broken_file_is_refused_and_runs_no_code(directory, tmp_path, capsys):
    path = tmp_path / "pretrained.pt"
    for name, content in broken_files((directory / FILE).read_bytes()).items():
        path.write_bytes(content)
        with pytest.raises(BadInputError, match="is not the checkpoint that is needed"):
            read_weights(path, "model_state")
            pytest.fail(name)
    with pytest.raises(BadInputError):
        read_weights(tmp_path / "missing.pt", "model_state")
    assert "ran" not in capsys.readouterr().out
