"""Duplex: a parrot, which says in each frame what it has heard in the one before, and counts."""

import json
from pathlib import Path
from typing import Any

import torch

from sglang_live.errors import BadInputError
from sglang_live.models.duplex_talker import DuplexTalker
from test.toys.counting import (
    FRAME_S,
    HIDDEN,
    N_CODES,
    VOICE,
    ToyFamily,
    one_hot,
    save,
)

N_BOOKS = 2
# Ids: the text, which counts; behind it, in a prompt, the beginning.
VOCAB = N_CODES
BEGIN_ID = VOCAB


class Talker(DuplexTalker):
    external_models = "test.toys.engine"
    frame_s, n_codes, n_heard, delays = FRAME_S, N_BOOKS, N_BOOKS, (0,) * N_BOOKS
    context_frames, temperature, voices = 200, 1.0, (VOICE,)

    def __init__(self, path: Path):
        self._path = path

    def engine_args(self, cache_dir: Path, n_rows: int, n_frames: int) -> dict[str, Any]:
        rows = {"live_rows": n_rows, "live_frames": n_frames}
        return {"model_path": str(self._path), "json_model_override_args": json.dumps(rows)}

    def prompt(self, voice: str, role: str) -> list[int]:
        if voice not in self.voices or role:
            raise BadInputError(f"a parrot of the voices {self.voices} takes no role")
        return [BEGIN_ID]

    def text(self, token: int) -> str:
        return f"{token} "


def build(path: Path) -> Path:
    embed, head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    for token in range(VOCAB):
        embed[token] = one_hot(token)
        head[token] = one_hot((token - 1) % VOCAB)
    codes = torch.stack([one_hot(VOCAB + code) for code in range(N_BOOKS * N_CODES)])
    tensors = {
        "model.embed_tokens.weight": embed,
        "text_head.weight": head,
        "code_table": codes,
    }
    own = {"architectures": ["ToyDuplex"], "vocab_size": VOCAB, "eos_token_id": None}
    return save(path, "duplex", N_BOOKS, tensors, **own)


FAMILY = ToyFamily("duplex", f"{__name__}:Talker", duplex_s=FRAME_S)
