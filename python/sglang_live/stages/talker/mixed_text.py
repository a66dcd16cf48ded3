"""The text of a passage as it grows, on its way between the frames of the request that speaks it.

In: its words. Out: the begin of the prompt, and groups of words for the scheduler, each as soon as
it is complete: which words are in a group does not depend on when they come.
Owner: one MixedText per passage.
"""

import asyncio
from collections.abc import Callable

from sglang_live.models.speech_lm.mixing import MixedVoice

# Text for the engine, and whether it is the last.
Pass = Callable[[list[int], bool], None]


class MixedText:
    """
    Attributes:
        n_words: of the passage so far.
        is_complete: whether the passage is.
    """

    def __init__(self, voice: MixedVoice):
        self.voice = voice
        self._words = list(voice.words)
        self._n_passed = voice.n_prompt
        self._pass: Pass | None = None
        self._grew = asyncio.Event()
        self.is_complete = False

    @property
    def n_words(self) -> int:
        return len(self._words) - len(self.voice.words)

    def add(self, words: list[int]) -> None:
        self._words += words
        self._on_growth()

    def end(self) -> None:
        self.is_complete = True
        self._on_growth()

    def _on_growth(self) -> None:
        self._grew.set()
        if self._pass is not None:
            self._pass_on(self._pass)

    async def can_be_mixed(self) -> bool:
        """Known as soon as there are words enough. Not if it ends before; it is complete then."""
        while not self._is_enough and not self.is_complete:
            self._grew.clear()
            await self._grew.wait()
        return self._is_enough

    @property
    def _is_enough(self) -> bool:
        return len(self._words) >= self.voice.n_least

    async def complete(self) -> None:
        while not self.is_complete:
            self._grew.clear()
            await self._grew.wait()

    def prompt(self) -> list[int]:
        """Of a passage that can be mixed."""
        return self.voice.prompt(self._words)

    def pass_to(self, receive: Pass | None) -> None:
        """Pass what is there, and what comes, behind the prompt; None: nothing any more."""
        self._pass = receive
        if receive is not None:
            self._pass_on(receive)

    def _pass_on(self, receive: Pass) -> None:
        ids: list[int] = []
        n = self.voice.ratio.n_text
        while len(self._words) - self._n_passed >= n:
            ids += self.voice.group(self._words[self._n_passed : self._n_passed + n])
            self._n_passed += n
        if self.is_complete:
            ids += self.voice.rest(self._words[self._n_passed :])
            self._pass = None
        if ids:
            receive(ids, self.is_complete)
