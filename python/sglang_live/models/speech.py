"""Contracts of speech recognisers and voices that are models of their own, beside an LLM.

A recogniser hears for a language model that reads text only; a voice reads its text aloud. Both
are loaded once in a process and shared by its sessions. SpeechModel is one as it is found before
its stage loads it.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sglang_live.core import HeardToken
from sglang_live.models.packages import Package
from sglang_live.speakable.style import SpeechStyle


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """
    Attributes:
        load: "module:attribute" of the function that loads it from its directory or file.
        path: that directory or file. None: the directory of `package`.
        package: with its weights, or None.
        packages: what else it needs, by the keywords under which `load` takes their directories.
        offers: names of a voice's voices; codes of a recogniser's languages.
        gives: what a recogniser has beside text: "details", of a DetailedRecogniser, and
            "translations".
    """

    load: str
    path: Path | None = None
    package: Package | None = None
    packages: Mapping[str, Package] = field(default_factory=dict)
    offers: tuple[str, ...]
    gives: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesKind:
    """A kind of recogniser or voice that users have as files.

    Attributes:
        holds: the files that make one, for errors.
        claims: whether a path is one.
        read: describes a path that is claimed. Raises BadInputError if a file is missing or broken,
            or something that must be installed is not.
    """

    holds: str
    claims: Callable[[Path], bool]
    read: Callable[[Path], SpeechModel]


Pcm = npt.NDArray[np.int16]


class Recogniser(Protocol):
    """Speech to text."""

    def transcribe(self, pcm: Pcm) -> str:
        """Recognise one utterance. May be called from several threads.

        Args:
            pcm: [n] int16, mono, at INPUT_RATE_HZ; of any length.
        Returns:
            One line without spaces at its ends; "" if nothing is recognised.
        """
        ...


@runtime_checkable
class DetailedRecogniser(Recogniser, Protocol):
    """One that aligns its text with the sound."""

    def transcribe_in_detail(self, pcm: Pcm, *, translates: bool) -> list[HeardToken]:
        """The same speech, token by token; translates: in English, if it gives translations."""
        ...


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """Where a word of the text ends in the sound.

    end: index in the text after the word's last character.
    end_s: end of the word in seconds from the beginning of the sound. A word that makes no sound
        ends with the word before it.
    """

    end: int
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Speech:
    """A text that was read aloud.

    pcm: [n] int16, mono, at the voice's sample_rate_hz; empty if nothing can be spoken.
    words: of the text split at white space, in order; their times never decrease. Empty if
        nothing can be spoken.
    """

    pcm: Pcm
    words: tuple[SpokenWord, ...] = field(default=())


class Voice(Protocol):
    """Text to speech."""

    @property
    def sample_rate_hz(self) -> int: ...

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of the voices; the first is the default."""
        ...

    @property
    def style(self) -> SpeechStyle:
        """What it can speak, for the text before it."""
        ...

    @property
    def times_words(self) -> bool:
        """Whether the ends of words are the model's own; otherwise they are estimated."""
        ...

    def synthesise(self, text: str, voice: str) -> Speech:
        """Read a text aloud, such as a sentence. May be called from several threads.

        voice: one of `voices`.
        Raises:
            BadInputError: the text is too long for one call, or the voice unknown.
        """
        ...


def computing_threads() -> int:
    """For one call, beside the engine on the same processor: half of the cores, at most 4.

    More gain little in networks of this size.
    """
    return min(4, max(1, (os.cpu_count() or 1) // 2))
