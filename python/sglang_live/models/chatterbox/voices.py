"""A voice of Chatterbox: what is known of its speaker, as 34 rows of a prompt.

Source: chatterbox, t3/modules/cond_enc.py and perceiver.py (MIT).
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.family import N_CODES

# Prefixes of the weights by which a voice becomes rows.
COND, TABLES = "cond_enc.", ("speech_emb.", "speech_pos_emb.")
SPEAKER_LAYER = f"{COND}spkr_enc."
_N_HEADS = 4  # of the perceiver; fixed in the reference


@dataclass(frozen=True, slots=True, eq=False)
class Voice:
    """
    Attributes:
        speaker: [n_values], an embedding.
        codes: [n_codes] int64, of a recording.
        emotion: how much of it is shown; 0.5 is usual, Turbo has none.
    """

    speaker: Tensor
    codes: Tensor
    emotion: float


def read_voice(file: Path, has_emotion: bool = True) -> Voice:
    """Raises BadInputError if the file is not one that Chatterbox has written for T3."""
    try:
        of_t3 = torch.load(file, map_location="cpu", weights_only=True)["t3"]
        voice = Voice(
            of_t3["speaker_emb"].flatten().float(),
            of_t3["cond_prompt_speech_tokens"].flatten().long(),
            float(of_t3["emotion_adv"]) if has_emotion else 0.0,
        )
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}") from error
    except (
        RuntimeError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise BadInputError(f"{file} is no voice of Chatterbox: {error}") from error
    if not len(voice.codes) or not 0 <= int(voice.codes.min()) <= int(voice.codes.max()) < N_CODES:
        raise BadInputError(f"{file} is no voice of Chatterbox: its codes are not below {N_CODES}")
    return voice


def voice_rows(voice: Voice, tensors: Mapping[str, Tensor]) -> Tensor:
    """[n_rows, width] of a prompt.

    Args:
        tensors: of cond_enc by their names without it, and speech_emb.weight and
            speech_pos_emb.emb.weight, in float32.
    Raises:
        KeyError: one is missing.
    """
    speaker = F.linear(voice.speaker, tensors["spkr_enc.weight"], tensors["spkr_enc.bias"])
    places = tensors["speech_pos_emb.emb.weight"][: len(voice.codes)]
    heard = tensors["speech_emb.weight"][voice.codes] + places
    queries = tensors["perceiver.pre_attention_query"][0]
    resampled = _attended(_attended(queries, heard, tensors), None, tensors)
    emotion = voice.emotion * tensors["emotion_adv_fc.weight"][:, 0]
    return torch.cat((speaker[None], resampled, emotion[None]))


# --- as values that responses bring along ---


def joined_values(of_t3: Tensor, of_flow: np.ndarray) -> np.ndarray:
    """[n] float32: what T3 and the flow know of a voice, flat."""
    return np.concatenate(([of_t3.numel()], of_t3.flatten().numpy(), of_flow), dtype=np.float32)


def split_values(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both parts of joined_values. Raises BadInputError: another model made the voice."""
    if not (len(values) and 0 < values[0] < len(values) - 1):
        raise BadInputError(f"another model made the voice: {len(values)} values")
    return values[1 : 1 + int(values[0])], values[1 + int(values[0]) :]


def _attended(x: Tensor, heard: Tensor | None, tensors: Mapping[str, Tensor]) -> Tensor:
    """[n, width] of what [n, width] sees in [n_heard, width]; None: in itself."""

    def linear(name: str, of: Tensor) -> Tensor:
        name = f"perceiver.attn.{name}"
        return F.linear(of, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    def normed(of: Tensor) -> Tensor:
        weight, bias = (tensors[f"perceiver.attn.norm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(of, weight.shape, weight, bias)

    seen = normed(x if heard is None else heard)
    parts = linear("to_q", normed(x)), linear("to_k", seen), linear("to_v", seen)
    query, key, value = (part.unflatten(1, (_N_HEADS, -1)).transpose(0, 1) for part in parts)
    found = F.scaled_dot_product_attention(query, key, value)
    return x + linear("proj_out", found.transpose(0, 1).flatten(1))
