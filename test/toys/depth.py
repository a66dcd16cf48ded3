"""Depth: a class of its own draws the first code, and the others from the one before, each with
weights of its own."""

import json
from pathlib import Path
from typing import Any

import torch

from sglang_live.errors import BadInputError
from sglang_live.models.piece_talker import FrameTalker
from sglang_live.speakable.style import SpeechStyle
from test.toys.counting import (
    FRAME_S,
    HIDDEN,
    LETTERS,
    N_CODES,
    VOICE,
    ToyFamily,
    counted,
    letters_of,
    one_hot,
    save,
)

N_BOOKS = 3
# Ids: the codes of the first book, and the end.
END_ID = N_CODES
VOCAB = END_ID + 1


class Talker(FrameTalker):
    external_models = "test.toys.engine"
    voices, style = (VOICE,), SpeechStyle()
    codes_per_frame, frame_s, chunk_frames = N_BOOKS, FRAME_S, 4
    temperature, repetition_penalty = 1.0, 1.0
    end_id = END_ID

    def __init__(self, path: Path):
        self._path = path

    def engine_args(self, cache_dir: Path, n_rows: int) -> dict[str, Any]:
        override = json.dumps({"live_rows": n_rows})
        return {"model_path": str(self._path), "json_model_override_args": override}

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        return [VOCAB + letter for letter in letters_of(text)]


def build(path: Path) -> Path:
    embed, head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    for code in range(N_CODES):
        embed[code] = one_hot(code)
        head[code] = one_hot((code - 1) % N_CODES)
    tensors = {
        "model.embed_tokens.weight": embed,
        "codec_head.weight": head,
        # A letter is as the code before its own.
        "text_table": torch.stack([one_hot((n - 1) % N_CODES) for n in range(len(LETTERS))]),
        "depth": torch.stack([_further(book) for book in range(1, N_BOOKS)]),
    }
    own = {"architectures": ["ToyDepth"], "vocab_size": VOCAB, "eos_token_id": END_ID}
    return save(path, "depth", N_BOOKS, tensors, **own)


def _further(n: int) -> torch.Tensor:
    """[N_CODES, N_CODES], which codes follow a code."""
    return torch.eye(N_CODES).roll(n, dims=1)


def expected(text: str) -> list[list[int]]:
    """The frames of a piece: each book is further than the one before, by its number."""
    return [[code, (code + 1) % N_CODES, (code + 3) % N_CODES] for code in counted(text)]


FAMILY = ToyFamily("depth", f"{__name__}:Talker")
