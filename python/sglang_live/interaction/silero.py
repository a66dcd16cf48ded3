"""The Silero VAD network: windows of audio in, probability of speech out.

In: overlapping 16 kHz windows of one caller. Out: one probability per window, the next state.
Owner: one SileroModel per process, shared by all callers; the recurrent state is the caller's.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

WINDOW_SAMPLES = 512
CONTEXT_SAMPLES = 64
_STATE_SHAPE = (1, 1, 128)
# The graph that takes a run of windows per call: same output as one window per call, half the time.
_MODEL_FILE = "silero_vad_16k_sequence.onnx"


@dataclass(frozen=True, slots=True, eq=False)
class SpeechState:
    """Recurrent state after the last window; h and c: [1, 1, 128] float32."""

    h: np.ndarray
    c: np.ndarray


class SpeechModel(Protocol):
    def initial_state(self) -> SpeechState: ...

    def probabilities(
        self, windows: np.ndarray, state: SpeechState
    ) -> tuple[np.ndarray, SpeechState]:
        """Score consecutive windows.

        Args:
            windows: [n, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32 in [-1, 1]; each begins with
                the last CONTEXT_SAMPLES of the one before.
        Returns:
            [n] float32 probabilities of speech, and the state after the last window.
        """
        ...


class SileroModel:
    """Silero v6 through onnxruntime on one thread: a window is too small to share out."""

    def __init__(self, model_path: Path | None = None):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # the published graph has unused weights and says so
        self._session = onnxruntime.InferenceSession(
            str(model_path or bundled_model_path()), options, providers=["CPUExecutionProvider"]
        )

    def initial_state(self) -> SpeechState:
        zeros = np.zeros(_STATE_SHAPE, np.float32)
        return SpeechState(zeros, zeros)

    def probabilities(
        self, windows: np.ndarray, state: SpeechState
    ) -> tuple[np.ndarray, SpeechState]:
        inputs = {"input": windows, "h": state.h, "c": state.c}
        probabilities, h, c = self._session.run(("speech_probs", "hn", "cn"), inputs)
        return probabilities, SpeechState(h, c)


def bundled_model_path() -> Path:
    """Find the network that the silero-vad package carries.

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
