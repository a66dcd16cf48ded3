"""Texts whose next words are predicted: those that need the far past, and those that do not.

In: a tokenizer. Out: texts of equal length in tokens, each behind the model's own chat header.
Sources: Python's language reference as CPython ships it (pydoc_data, PSF-2.0), and Taskmaster-4's
dialogues in a coffee shop (benchmark/workloads, CC BY 4.0).
"""

import gzip
import json
import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Self

import torch
from torch import Tensor

DIALOGUES = Path(__file__).parents[1] / "workloads" / "coffee_dialogues.jsonl.gz"
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Texts:
    """
    Attributes:
        ids: [n_texts, n_tokens] int64.
        scored: [n_tokens] bool: tokens whose prediction counts.
    """

    kind: str
    ids: Tensor
    scored: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """
    n_texts: of each kind.
    scored_from: first token that counts: each window has been exceeded by then.
    n_tokens: of a text.
    copied_tokens, copied_over: a text of the kind `copied` has passages of this length that come
        again verbatim after this many tokens.
    """

    n_texts: int
    scored_from: int
    n_tokens: int
    copied_tokens: int
    copied_over: int

    @classmethod
    def of(cls, n_texts: int, window_tokens: int) -> Self:
        """window_tokens: the largest; it alone reaches back to what is copied."""
        return cls(
            n_texts=n_texts,
            scored_from=window_tokens * 5 // 4,
            n_tokens=window_tokens * 2,
            copied_tokens=window_tokens // 8,
            copied_over=window_tokens * 5 // 8,
        )


def texts_of(tokenizer: Any, sizes: TextSizes, seed: int) -> list[Texts]:
    header = header_ids(tokenizer)
    return [
        _prose(tokenizer, header, sizes, seed),
        _dialogues(tokenizer, header, sizes, seed),
        _copied(tokenizer, header, sizes, seed),
    ]


def header_ids(tokenizer: Any) -> list[int]:
    """The beginning of every conversation: the template's own instructions."""
    ids = templated(tokenizer, [{"role": "user", "content": ""}])
    empty = tokenizer("<|im_start|>user\n<|im_end|>\n", add_special_tokens=False).input_ids
    assert ids[-len(empty) :] == empty, "the template ends with the user's message"
    return ids[: -len(empty)]


def templated(tokenizer: Any, messages: list[Message], *, opens: bool = False) -> list[int]:
    """opens: whether a response is begun."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def load_dialogues() -> list[list[Message]]:
    with gzip.open(DIALOGUES, "rt", encoding="utf-8") as lines:
        found = [json.loads(line)["turns"] for line in lines]
    return [[{"role": role, "content": text} for role, text in turns] for turns in found]


def _prose(tokenizer: Any, header: list[int], sizes: TextSizes, seed: int) -> Texts:
    rows = [header + part for part in _passages(tokenizer, sizes, seed, len(header))]
    return Texts("prose", torch.tensor(rows), _late(sizes))


def _passages(tokenizer: Any, sizes: TextSizes, seed: int, n_header: int) -> list[list[int]]:
    """Consecutive parts of the reference, whose topics are in a random order."""
    names = sorted(topics)
    random.Random(seed).shuffle(names)
    n_tokens = sizes.n_tokens - n_header
    ids: list[int] = []
    for name in names:
        if len(ids) >= n_tokens * sizes.n_texts:
            break
        ids += tokenizer(topics[name], add_special_tokens=False).input_ids
    return [ids[i * n_tokens : (i + 1) * n_tokens] for i in range(sizes.n_texts)]


def _dialogues(tokenizer: Any, header: list[int], sizes: TextSizes, seed: int) -> Texts:
    """Each text is a row of independent dialogues."""
    rng = random.Random(seed)
    dialogues, rows = load_dialogues(), []
    for _ in range(sizes.n_texts):
        ids = list(header)
        rng.shuffle(dialogues)
        for turns in dialogues:
            if len(ids) >= sizes.n_tokens:
                break
            ids += templated(tokenizer, turns)[len(header) :] if turns else []
        rows.append(ids[: sizes.n_tokens])
    return Texts("dialogues", torch.tensor(rows), _late(sizes))


def _copied(tokenizer: Any, header: list[int], sizes: TextSizes, seed: int) -> Texts:
    """As prose, but passages come again, and those alone count, without their first tokens."""
    texts = _prose(tokenizer, header, sizes, seed + 1)
    scored = torch.zeros(sizes.n_tokens, dtype=torch.bool)
    lead = 16  # until the text shows that it is a copy
    for begin in range(sizes.scored_from, sizes.n_tokens, 2 * sizes.copied_tokens):
        end = min(begin + sizes.copied_tokens, sizes.n_tokens)
        texts.ids[:, begin:end] = texts.ids[:, begin - sizes.copied_over : end - sizes.copied_over]
        scored[begin + lead : end] = True
    return Texts("copied", texts.ids, scored)


def _late(sizes: TextSizes) -> Tensor:
    return torch.arange(sizes.n_tokens) >= sizes.scored_from
