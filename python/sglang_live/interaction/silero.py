"""The Silero VAD network: windows of audio in, probability of speech out.

In: overlapping 16 kHz windows, one of each caller. Out: a probability each, and the next states.
Owner: one SileroModel per process, shared by all callers; the recurrent state is the caller's.
"""

import importlib.util
from pathlib import Path
from typing import Protocol

import numpy as np

WINDOW_SAMPLES = 512
CONTEXT_SAMPLES = 64
STATE_SHAPE = (2, 128)
_RATE = np.array(16_000, np.int64)
# The graph that takes one window of many callers per call.
_MODEL_FILE = "silero_vad_16k_op15.onnx"


class SpeechModel(Protocol):
    def score(self, windows: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score one window of each of n callers.

        Args:
            windows: [n, CONTEXT_SAMPLES + WINDOW_SAMPLES] float32 in [-1, 1]; each begins with
                the last CONTEXT_SAMPLES of the caller's window before.
            states: [2, n, 128] float32, after the window before; zeros at first.
        Returns:
            [n] float32 probabilities of speech, and the states after these windows.
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

    def score(self, windows: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = {"input": windows, "state": states, "sr": _RATE}
        probabilities, states = self._session.run(("output", "stateN"), inputs)
        return probabilities[:, 0], states


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
        raise FileNotFoundError(f"silero-vad has no {_MODEL_FILE}; need version 6 or later")
    return path
