"""Voices of PersonaPlex: what the language model's input was while a recording was played to it.

A file has the inputs as embeddings, and the codes of the last two frames, of which the later one
is not whole yet: acoustic codes come a frame later than the others.
Source: NVIDIA/personaplex (models/lm.py).
"""

from pathlib import Path

import torch
from torch import Tensor

from sglang_live.errors import BadInputError

# Codes of a frame in which nothing is heard of the model, and one that the user's place has while
# the prompt is read (NVIDIA/personaplex: models/lm.py).
SILENCE = (948, 243, 1178, 546, 1736, 1030, 1978, 2008)
SINE = (430, 1268, 381, 1611, 1095, 1495, 56, 472)


def read_voice(file: Path) -> tuple[Tensor, Tensor]:
    """
    Returns:
        embeddings [n, width], and codes [2, 1 + n_codes + n_heard] int64 of the next two frames;
        of the second one only those that are delayed have a meaning.
    Raises:
        BadInputError: it is no voice of PersonaPlex.
    """
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        embeddings = state["embeddings"].flatten(0, -2)
        cache = state["cache"][0]  # a ring of frames
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BadInputError(f"{file} is no voice of PersonaPlex: {error}") from error
    n = len(embeddings)
    codes = torch.stack([cache[:, at % cache.shape[1]] for at in (n, n + 1)])
    return embeddings, codes.long()


def n_voice_rows(file: Path) -> int:
    return len(read_voice(file)[0]) + 2
