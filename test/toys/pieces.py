"""Pieces: SGLang's own Llama writes the codes as ids, two of each frame."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sglang_live.errors import BadInputError
from sglang_live.models.piece_talker import StockTalker, WrongCodeError
from sglang_live.speakable.style import SpeechStyle
from test.toys.counting import (
    END_CODE,
    FRAME_S,
    LETTERS,
    N_CODES,
    VOICE,
    ToyFamily,
    counted,
    letters_of,
    one_hot,
    save,
)

N_BOOKS = 2
# Ids: the codes of both books, the end, and letters behind it.
END_ID = N_BOOKS * N_CODES
FIRST_LETTER = END_ID + 1
VOCAB = FIRST_LETTER + len(LETTERS)


class Reader:
    """A FrameReader."""

    def __init__(self) -> None:
        self._codes: list[int] = []

    def add(self, ids: list[int]) -> list[list[int]]:
        frames = []
        for token in ids:
            book, code = divmod(token, N_CODES)
            if book != len(self._codes):
                raise WrongCodeError(f"id {token} is no code of book {len(self._codes)}")
            self._codes.append(code)
            if len(self._codes) == N_BOOKS:
                frames.append(self._codes)
                self._codes = []
        return frames


class Talker(StockTalker):
    voices, style = (VOICE,), SpeechStyle()
    codes_per_frame = steps_per_frame = N_BOOKS
    frame_s, chunk_frames = FRAME_S, 4
    stop_ids = (END_ID,)
    sampling: Mapping[str, Any] = {"temperature": 0.0}

    def __init__(self, path: Path):
        self._path = path

    def engine_args(self, cache_dir: Path) -> dict[str, Any]:
        return {"model_path": str(self._path)}

    def prompt(self, voice: str, text: str) -> list[int]:
        if voice not in self.voices:
            raise BadInputError(f"voice {voice!r} is not one of {self.voices}")
        return [FIRST_LETTER + letter for letter in letters_of(text)]

    def frames(self) -> Reader:
        return Reader()


def build(path: Path) -> Path:
    embed, head = (torch.zeros(VOCAB, one_hot(0).numel()) for _ in range(2))
    for token in range(VOCAB):
        embed[token] = one_hot(token)
        book, code = divmod(token, N_CODES)
        following = END_ID
        if token >= FIRST_LETTER:
            following = token - FIRST_LETTER
        elif book == 0:
            following = N_CODES + code
        elif code + 1 < END_CODE:
            following = code + 1
        head[following] += one_hot(token)
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    own = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "eos_token_id": END_ID}
    return save(path, "pieces", N_BOOKS, tensors, **own)


def expected(text: str) -> list[list[int]]:
    """The frames of a piece."""
    return [[code, code] for code in counted(text)]


FAMILY = ToyFamily("pieces", f"{__name__}:Talker")
