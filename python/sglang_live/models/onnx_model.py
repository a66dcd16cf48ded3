"""Networks in ONNX files of users, on the CPU."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.threads import computing_threads


def open_onnx(path: Path, inputs: Collection[str], n_threads: int = 0) -> Any:
    """An onnxruntime session.

    Args:
        inputs: that the network must have.
        n_threads: for one call; 0: see computing_threads.
    Raises:
        BadInputError: the file is broken, or it is another network.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads or computing_threads()
    options.inter_op_num_threads = 1
    # A thread that spins between two operators takes the engine's core.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3  # exported networks have unused weights, which are logged
    # Products of uint8 and int8 overflow on x86 processors that lack VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        raise BadInputError(f"onnxruntime cannot read {path}: {error}") from error
    found = [given.name for given in session.get_inputs()]
    if missing := [name for name in inputs if name not in found]:
        raise BadInputError(
            f"{path} is another network: its inputs are {', '.join(found)}, without "
            f"{', '.join(missing)}"
        )
    return session
