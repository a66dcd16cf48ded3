"""The Silero VAD network: windows of audio in, probability of speech out.

In: overlapping 16 kHz windows of any number of users. Out: one probability per window, and each
user's next state.
Owner: one SileroModel per process, shared by all sessions; a detector keeps its recurrent state.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

WINDOW_SAMPLES = 512
CONTEXT_SAMPLES = 64
_MODEL_FILE = "silero_vad_16k_sequence.onnx"

_WIDTH = 128  # of the recurrent state


@dataclass(frozen=True, slots=True, eq=False)
class SpeechState:
    """Recurrent state after the last window; h and c: [128] float32."""

    h: np.ndarray
    c: np.ndarray


# Consecutive windows of one user, [n, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32 in [-1, 1], each
# beginning with the last CONTEXT_SAMPLES of the one before; and the state before them.
SpeechWindows = tuple[np.ndarray, SpeechState]
# [n] float32 probabilities of speech, and the state after the last window.
SpeechScores = tuple[np.ndarray, SpeechState]


class SpeechModel(Protocol):
    def initial_state(self) -> SpeechState: ...

    def score(self, batch: Sequence[SpeechWindows]) -> list[SpeechScores]:
        """Score windows of several users at once, at least one of each."""
        ...


class SileroModel:
    """Silero v6 through onnxruntime on one thread: the work is too small for more."""

    def __init__(self, model_path: Path | None = None) -> None:
        import onnxruntime

        from sglang_live.interaction.silero_graph import for_many_users

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        path = model_path or bundled_model_path()
        model = for_many_users(path, WINDOW_SAMPLES, CONTEXT_SAMPLES)
        self._session = onnxruntime.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )

    def initial_state(self) -> SpeechState:
        zeros = np.zeros(_WIDTH, np.float32)
        return SpeechState(zeros, zeros)

    def score(self, batch: Sequence[SpeechWindows]) -> list[SpeechScores]:
        lengths = np.array([len(windows) for windows, _ in batch], np.int32)
        steps = np.arange(lengths.max())[:, None]
        inputs = {
            "windows": np.concatenate([windows for windows, _ in batch]),
            "at": np.where(steps < lengths, lengths.cumsum() - lengths + steps, 0),
            "lengths": lengths,
            "h": np.stack([state.h for _, state in batch])[None],
            "c": np.stack([state.c for _, state in batch])[None],
        }
        speech, h, c = self._session.run(("speech", "hn", "cn"), inputs)
        # Copies: a view would keep the states of all users in memory.
        states = [SpeechState(h[0, i].copy(), c[0, i].copy()) for i in range(len(batch))]
        return [(speech[:n, i], states[i]) for i, n in enumerate(lengths)]


def bundled_model_path() -> Path:
    """Find the network in the silero-vad package.

    The package is not imported: its __init__ needs torchaudio, the network file does not.

    Raises:
        FileNotFoundError: if the package or its data file is absent.
    """
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("silero-vad is not installed")
    path = Path(spec.submodule_search_locations[0]) / "data" / _MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(f"silero-vad has no {_MODEL_FILE}; need version 6.2 or later")
    return path
