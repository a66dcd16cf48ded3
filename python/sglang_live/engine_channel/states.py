"""Hidden states between processes, in the dtype of the engine that computed them.

numpy has no bfloat16, so an array of uint16 stands for one: two bytes each, and never a state
itself.
"""

import numpy as np
import torch
from torch import Tensor

_BFLOAT16 = np.dtype("<u2")


def to_array(states: Tensor) -> np.ndarray:
    """states: on the host, float32, float16 or bfloat16. Returns a view."""
    is_bfloat16 = states.dtype == torch.bfloat16
    array: np.ndarray = (states.view(torch.int16) if is_bfloat16 else states).numpy()
    return array.view(_BFLOAT16) if is_bfloat16 else array


def to_tensor(array: np.ndarray) -> Tensor:
    """The states of to_array(). A view, if the array can be written to."""
    array = array if array.flags.writeable else array.copy()
    if array.dtype == _BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
