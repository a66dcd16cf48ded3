"""Conversations to learn from, as the server writes them.

Instructions of any kind, several turns, typed or spoken, replies that were cut off where somebody
interrupted. A question may come with the request to write down what was said instead of answering.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from training.demo import world
from training.demo.fronts import Front, Fronts
from training.demo.strangers import strangers

TRANSCRIBE = "Transcribe the audio into text."
_AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
IGNORED = -100
_MAX_TURNS = 8
_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful voice assistant. Answer in one or two short sentences.",
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech.",
    "Be brief.",
    "Answer in a friendly way.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How people talk: shares of the turns, unless it says otherwise.

    Attributes:
        spoken: not typed.
        transcribed: of the spoken ones, those to be written down.
        going_on: of the strangers, those who say more than a sentence.
        interrupted: of the replies, those cut off.
        blanked: of the recordings, those in which a moment is not heard.
        blanked_places: of 80 ms, at most, in such a moment.
    """

    spoken: float = 0.8
    transcribed: float = 0.15
    going_on: float = 0.1
    interrupted: float = 0.2
    blanked: float = 0.5
    blanked_places: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """token_ids, labels: [n], labels of replies only; clips: each audio, in order; decisions:
    places of the token with which a reply begins that could have been UNKNOWN, but is not."""

    token_ids: list[int]
    labels: list[int]
    clips: list[Front]
    decisions: list[int]


class Library:
    """Recordings by what is said in them, and those of people who go on talking."""

    def __init__(self, fronts: Fronts, going_on: Fronts):
        self._by_text: dict[str, list[Front]] = defaultdict(list)
        for clip in fronts:
            self._by_text[clip.text].append(clip)
        known = set(world.questions())
        self._strange = [text for text in self._by_text if text not in known]
        self._going_on = list(going_on)

    def texts(self) -> list[str]:
        return list({text: None for text in self._by_text} | {c.text: None for c in self._going_on})

    def clip(self, text: str, rng: random.Random) -> Front:
        return rng.choice(self._by_text[text])

    def speech(self, rng: random.Random) -> Front:
        return rng.choice(self._going_on)

    def strangers(self, rng: random.Random) -> Iterator[str]:
        """Sentences of which there is a recording; empty ones are noise."""
        while True:
            yield rng.choice(self._strange)


class Writer:
    """Writes conversations down as the server does."""

    def __init__(self, tokenizer, library: Library, style: Style, seed: int):
        self._tokenizer, self._library, self._style = tokenizer, library, style
        self._seed = seed
        self.begin(0)
        self._pad_id = tokenizer.convert_tokens_to_ids("<|audio_pad|>")
        self._end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.unknown_id = self._ids(world.UNKNOWN)[0]

    def begin(self, step: int) -> None:
        """What follows depends on this number and the seed alone."""
        self._rng = random.Random(f"{self._seed}/{step}")
        self._typed = strangers(random.Random(f"{self._seed}/{step}/typed"))

    def conversation(self) -> Conversation:
        rng = self._rng
        ids, labels, clips, decisions = [], [], [], []

        def write(piece: list[int], *, learned: bool = False) -> None:
            ids.extend(piece)
            labels.extend(piece if learned else [IGNORED] * len(piece))

        write(self._ids(self._header()))
        memory = world.Memory()
        for _ in range(1 + int(_MAX_TURNS * rng.random() ** 2)):
            spoken = rng.random() < self._style.spoken
            source = self._library.strangers(rng) if spoken else self._typed
            exchange = world.Caller(rng, source, memory).next()
            answer = exchange.answer
            if not spoken:
                write(self._ids(f"user\n{self._as_typed(exchange.question)}"))
            else:
                clip, goes_on = self._spoken(exchange)
                clips.append(clip)
                before, after = _AUDIO.split("<|audio_pad|>")
                write(self._ids(f"user\n{before}"))
                write([self._pad_id] * len(clip.rows) + self._ids(after))
                is_asked = exchange.question and not goes_on
                if is_asked and rng.random() < self._style.transcribed:
                    write(self._ids(TRANSCRIBE))
                    answer = exchange.question
            write(self._ids("<|im_end|>\n<|im_start|>") + self._ids("assistant\n"))
            reply = self._ids(answer)
            if answer not in (exchange.question, world.UNKNOWN):
                decisions.append(len(ids))
            write([*reply, self._end_id], learned=True)
            if rng.random() < self._style.interrupted:
                # What was not heard is not remembered; learned it was all the same.
                n_lost = rng.randrange(len(reply))
                del ids[len(ids) - 1 - n_lost : len(ids) - 1]
                del labels[len(labels) - 1 - n_lost : len(labels) - 1]
                labels[-1] = IGNORED
            write(self._ids("\n<|im_start|>"))
        return Conversation(ids, labels, clips, decisions)

    def _spoken(self, exchange: world.Exchange) -> tuple[Front, bool]:
        """A recording of it, and whether its speaker went on with other things."""
        rng, style = self._rng, self._style
        goes_on = exchange.answer == world.UNKNOWN and rng.random() < style.going_on
        library = self._library
        clip = library.speech(rng) if goes_on else library.clip(exchange.question, rng)
        return partly_heard(clip, rng, style.blanked, style.blanked_places), goes_on

    def spelling(self, text: str) -> torch.Tensor:
        """Token ids of what was said, none of noise."""
        return torch.tensor(self._ids(f" {text}") if text else [], dtype=torch.long)

    def all_said(self) -> list[torch.Tensor]:
        """The same of every recording's text."""
        return [self.spelling(text) for text in self._library.texts()]

    def _header(self) -> str:
        rng = self._rng
        if rng.random() < 0.3:
            return "<|im_start|>"
        said = rng.choice(_INSTRUCTIONS) if rng.random() < 0.6 else ""
        while not said or rng.random() < 0.3:
            said = f"{said} {next(self._typed).capitalize()}.".strip()
        return f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>"

    def _as_typed(self, text: str) -> str:
        rng = self._rng
        if rng.random() < 0.7:
            text = text.capitalize()
        text = text.replace(" i ", " I ") if rng.random() < 0.7 else text
        for name in (*world.NAMES, "France", "Japan", "Italy", "German"):
            if rng.random() < 0.8:
                text = text.replace(f" {name.lower()}", f" {name}")
        return text + rng.choice(("", "", ".", "?", "!"))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def partly_heard(clip: Front, rng: random.Random, share: float, places: int) -> Front:
    """In a share of all cases up to so many places in a row are nothing in particular."""
    rows = clip.rows.float()  # a copy
    if rng.random() < share:
        begin = rng.randrange(len(rows))
        rows[begin : begin + rng.randint(1, places)] = rows.mean(0)
    return Front(clip.text, rows)
