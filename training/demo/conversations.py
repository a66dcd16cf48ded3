"""Training conversations, in the server's format.

Any instructions, several turns, typed or spoken, and responses truncated by an interruption. A
spoken question may come with an instruction to transcribe it instead of an answer.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from training.demo import world
from training.demo.convolved import ConvolvedClip, ConvolvedClips
from training.demo.unknown_sentences import unknown_sentences

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
    """Shares of kinds of turns.

    Attributes:
        spoken: share of turns that are spoken, not typed.
        transcribed: share of spoken questions with the instruction to transcribe.
        going_on: share of unknown sentences in which the speaker continues to talk.
        interrupted: share of responses that are truncated.
        blanked: share of recordings in which a moment is blanked out.
        blanked_places: length of such a moment, at most, in places of 80 ms.
    """

    spoken: float = 0.8
    transcribed: float = 0.15
    going_on: float = 0.1
    interrupted: float = 0.2
    blanked: float = 0.5
    blanked_places: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One training conversation.

    token_ids: [n].
    labels: [n], IGNORED outside responses.
    clips: the audio inputs in their order.
    decisions: positions of first tokens of responses that are not UNKNOWN and no transcription.
    """

    token_ids: list[int]
    labels: list[int]
    clips: list[ConvolvedClip]
    decisions: list[int]


class Library:
    """Recordings by their text, and those of speakers who continue to talk."""

    def __init__(self, convolved: ConvolvedClips, going_on: ConvolvedClips):
        self._by_text: dict[str, list[ConvolvedClip]] = defaultdict(list)
        for clip in convolved:
            self._by_text[clip.text].append(clip)
        known = set(world.questions())
        self._strange = [text for text in self._by_text if text not in known]
        self._going_on = list(going_on)

    def texts(self) -> list[str]:
        return list({text: None for text in self._by_text} | {c.text: None for c in self._going_on})

    def clip(self, text: str, rng: random.Random) -> ConvolvedClip:
        return rng.choice(self._by_text[text])

    def speech(self, rng: random.Random) -> ConvolvedClip:
        return rng.choice(self._going_on)

    def unknown_sentences(self, rng: random.Random) -> Iterator[str]:
        """An endless iterator of unknown sentences with a recording; the empty one is noise."""
        while True:
            yield rng.choice(self._strange)


class Writer:
    """Writes conversations as token ids, in the server's format."""

    def __init__(self, tokenizer, library: Library, style: Style, seed: int):
        self._tokenizer, self._library, self._style = tokenizer, library, style
        self._seed = seed
        self.begin(0)
        self._pad_id = tokenizer.convert_tokens_to_ids("<|audio_pad|>")
        self._end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.unknown_id = self._ids(world.UNKNOWN)[0]

    def begin(self, step: int) -> None:
        """Reseed: the following conversations depend only on the seed and the step."""
        self._rng = random.Random(f"{self._seed}/{step}")
        self._typed = unknown_sentences(random.Random(f"{self._seed}/{step}/typed"))

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
            source = self._library.unknown_sentences(rng) if spoken else self._typed
            exchange = world.User(rng, source, memory).next()
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
            response = self._ids(answer)
            if answer not in (exchange.question, world.UNKNOWN):
                decisions.append(len(ids))
            write([*response, self._end_id], learned=True)
            if rng.random() < self._style.interrupted:
                # The unheard end leaves the history, as in the server's truncation.
                n_lost = rng.randrange(len(response))
                del ids[len(ids) - 1 - n_lost : len(ids) - 1]
                del labels[len(labels) - 1 - n_lost : len(labels) - 1]
                labels[-1] = IGNORED
            write(self._ids("\n<|im_start|>"))
        return Conversation(ids, labels, clips, decisions)

    def _spoken(self, exchange: world.Exchange) -> tuple[ConvolvedClip, bool]:
        """A recording of the question, and whether its speaker continues to talk."""
        rng, style = self._rng, self._style
        goes_on = exchange.answer == world.UNKNOWN and rng.random() < style.going_on
        library = self._library
        clip = library.speech(rng) if goes_on else library.clip(exchange.question, rng)
        return partly_heard(clip, rng, style.blanked, style.blanked_places), goes_on

    def spelling(self, text: str) -> torch.Tensor:
        """Token ids of a recording's text; empty for noise."""
        return torch.tensor(self._ids(f" {text}") if text else [], dtype=torch.long)

    def all_spellings(self) -> list[torch.Tensor]:
        """`spelling` of every recording's text."""
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


def partly_heard(
    clip: ConvolvedClip, rng: random.Random, share: float, places: int
) -> ConvolvedClip:
    """A copy in which, with probability `share`, up to `places` places in a row are the mean."""
    rows = clip.rows.float()  # a copy
    if rng.random() < share:
        begin = rng.randrange(len(rows))
        rows[begin : begin + rng.randint(1, places)] = rows.mean(0)
    return ConvolvedClip(clip.text, rows)
