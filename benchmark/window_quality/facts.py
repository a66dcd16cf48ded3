"""Dialogues in which a user says facts early and late, and asks for them at the end.

In: a tokenizer, and held sessions. Out: whether the model chooses the value that was said, among
eight of its kind, and whether it would say it. Between the facts are dialogues of texts.py.
"""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmark.window_quality.held import Arm, HeldSessions
from benchmark.window_quality.texts import Message, header_ids, load_dialogues, templated


@dataclass(frozen=True, slots=True)
class Kind:
    """said, asked and begun: the user's sentence, their question, the begin of its answer."""

    said: str
    asked: str
    begun: str
    values: tuple[str, ...]


def _kind(said: str, asked: str, begun: str, values: str) -> Kind:
    return Kind(said, asked, begun, tuple(values.split()))


KINDS = (
    _kind(
        "My name is {}.",
        "What is my name?",
        "Your name is",
        "Anna David Emma Henry Julia Mark Peter Sarah",
    ),
    _kind(
        "I live in {}.",
        "In which city do I live?",
        "You live in",
        "Boston Chicago Denver London Paris Berlin Rome Tokyo",
    ),
    _kind(
        "I work as a {}.",
        "What is my job?",
        "You work as a",
        "baker doctor farmer lawyer nurse pilot teacher writer",
    ),
    _kind(
        "My favorite color is {}.",
        "What is my favorite color?",
        "Your favorite color is",
        "red blue green yellow orange purple black white",
    ),
    _kind(
        "I play the {}.",
        "Which instrument do I play?",
        "You play the",
        "piano guitar violin flute drums trumpet harp organ",
    ),
    _kind(
        "My pet is a {}.",
        "What kind of animal is my pet?",
        "Your pet is a",
        "dog cat rabbit horse parrot turtle snake fish",
    ),
    _kind(
        "My birthday is in {}.",
        "In which month is my birthday?",
        "Your birthday is in",
        "January February March April June August October December",
    ),
    _kind(
        "My favorite sport is {}.",
        "What is my favorite sport?",
        "Your favorite sport is",
        "tennis football golf hockey skating swimming boxing baseball",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactSizes:
    """
    n_groups, n_in_group: dialogues of a group differ in the values only, each of which is one
        token: they are computed as a batch.
    n_tokens: of a dialogue before its questions, at least.
    """

    n_groups: int
    n_tokens: int
    n_in_group: int = 4


@dataclass(frozen=True, slots=True)
class Group:
    """
    Attributes:
        turns: [n_dialogues, n] token ids of each turn, the chat header in the first.
        early, late: the values said of each kind, in the first message and in the last.
    """

    turns: list[Tensor]
    early: dict[Kind, list[str]]
    late: dict[Kind, list[str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """
    chosen: of the eight values the one that was said is the most likely.
    said: it is the most likely token of all.
    """

    dialogue: int
    where: str
    chosen: bool
    said: bool


def groups_of(tokenizer: Any, sizes: FactSizes, seed: int) -> list[Group]:
    return [_group(tokenizer, sizes, f"{seed} {n}") for n in range(sizes.n_groups)]


def _group(tokenizer: Any, sizes: FactSizes, seed: str) -> Group:
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, len(KINDS))
    early, late = (
        {kind: [rng.choice(kind.values) for _ in range(sizes.n_in_group)] for kind in part}
        for part in (kinds[: len(kinds) // 2], kinds[len(kinds) // 2 :])
    )
    header = header_ids(tokenizer)
    first = _facts(tokenizer, early, "Hello! Let me introduce myself.")
    turns = [torch.cat([torch.tensor([header] * len(first)), first], dim=1)]
    n_tokens = turns[0].shape[1]
    others = load_dialogues()
    rng.shuffle(others)
    for messages in others:
        if n_tokens >= sizes.n_tokens:
            break
        if messages:
            ids = templated(tokenizer, messages)[len(header) :]
            turns.append(torch.tensor([ids] * sizes.n_in_group))
            n_tokens += len(ids)
    turns.append(_facts(tokenizer, late, "There is more about me."))
    return Group(turns, early, late)


def _facts(tokenizer: Any, values: dict[Kind, list[str]], opening: str) -> Tensor:
    """Returns [n_dialogues, n] token ids of a message with the facts, and of its answer."""
    n_header = len(header_ids(tokenizer))
    rows = []
    for said in zip(*values.values(), strict=True):
        facts = " ".join(kind.said.format(v) for kind, v in zip(values, said, strict=True))
        messages: list[Message] = [
            {"role": "user", "content": f"{opening} {facts}"},
            {"role": "assistant", "content": "Thank you, I will remember that."},
        ]
        rows.append(templated(tokenizer, messages)[n_header:])
    return torch.tensor(rows)


def ask(model: Any, tokenizer: Any, arm: Arm, group: Group) -> list[Answer]:
    """Every question is asked behind the same dialogue."""
    sessions = HeldSessions(model, arm)
    for ids in group.turns:
        sessions.append(ids, n_logits=1)
        sessions.end_turn()
    answers = []
    for where, values in (("early", group.early), ("late", group.late)):
        for kind, said in values.items():
            last = _asked(sessions.branch(), tokenizer, kind, len(said))
            ids = torch.tensor([_id_of(tokenizer, v) for v in kind.values])
            chosen, likeliest = ids[last[:, ids].argmax(dim=1)], last.argmax(dim=1)
            for n, value in enumerate(said):
                right = _id_of(tokenizer, value)
                answers.append(
                    Answer(n, where, bool(chosen[n] == right), bool(likeliest[n] == right))
                )
    return answers


def _asked(sessions: HeldSessions, tokenizer: Any, kind: Kind, n: int) -> Tensor:
    """Returns [n, vocabulary]: the logits behind the begun answer."""
    question: list[Message] = [{"role": "user", "content": kind.asked}]
    ids = templated(tokenizer, question, opens=True)[len(header_ids(tokenizer)) :]
    ids += tokenizer(kind.begun, add_special_tokens=False).input_ids
    return sessions.append(torch.tensor([ids] * n), n_logits=1)[:, -1].float()


def _id_of(tokenizer: Any, value: str) -> int:
    [only] = tokenizer(" " + value, add_special_tokens=False).input_ids
    found: int = only
    return found
