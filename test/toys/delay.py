"""Delay: the second book is a step behind the first one."""

from pathlib import Path

import torch

from sglang_live.models.speech_lm.delay import Delay
from test.toys import depth
from test.toys.counting import (
    END_CODE,
    HIDDEN,
    LETTERS,
    N_CODES,
    ToyFamily,
    counted,
    letters_of,
    one_hot,
    save,
)

DELAY = Delay(n_books=2, n_codes=N_CODES, begin_id=N_CODES, end_id=N_CODES + 1, marks_end=True)
N_BOOKS = DELAY.n_books
BOOK = N_CODES + 2  # ids: codes and marks of each book
VOCAB = N_BOOKS * BOOK


class Talker(depth.Talker):
    codes_per_frame, lag_steps = N_BOOKS, N_BOOKS - 1
    end_id = VOCAB - 1

    def prompt(self, voice: str, text: str) -> list[int]:
        super().prompt(voice, text)  # it knows the voices
        return [VOCAB + letter for letter in letters_of(text)]


def build(path: Path) -> Path:
    embed, head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    for book in range(N_BOOKS):
        ids, at = book * BOOK, book * N_CODES
        for code in range(N_CODES):
            embed[ids + code] = one_hot(at + code)
            head[ids + code] = one_hot(at + (code - 1) % N_CODES)
        # The mark before the first code is as the code before it.
        embed[ids + DELAY.begin_id] = one_hot(at + N_CODES - 1)
        head[ids + DELAY.end_id] = one_hot(at + END_CODE - 1, height=2.0)
    tensors = {
        "model.embed_tokens.weight": embed,
        "codec_head.weight": head,
        "text_table": torch.stack([one_hot((n - 1) % N_CODES) for n in range(len(LETTERS))]),
    }
    own = {"architectures": ["ToyDelay"], "vocab_size": VOCAB, "eos_token_id": VOCAB - 1}
    return save(path, "delay", N_BOOKS, tensors, **own)


def expected(text: str) -> list[list[int]]:
    """The frames of a piece: the second book counts from the beginning."""
    return [[code, n] for n, code in enumerate(counted(text))]


FAMILY = ToyFamily("delay", f"{__name__}:Talker")
