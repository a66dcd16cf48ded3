"""The words of a voice over a response that was too short to interrupt it.

In: the audio of the voice. Out: a call of `on_turn` if its words take the turn: "stop", "wait".
Owner: one VoiceWords per connection. One voice at a time; one that comes meanwhile has no words.

The words are in `assets/interrupting_words.json`, by language (ISO 639-1). They are words that take
the turn and not back-channels, because a small recogniser writes a hum as some word. Moonshine tiny
recognises 3 of 14 back-channels in recordings of meetings, and for none of the others it writes a
word of this list but "no".
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.core import AudioPart
from sglang_live.gateway.transcribe import text_of
from sglang_live.orchestrator.sessions import VoiceSession
from sglang_live.telemetry.metrics import GatewayMetrics

# Words that come later would stop a response at a point that has nothing to do with them.
_LATE_S = 1.0
_WIND_DOWN_S = 1.0
_WORDS = Path(__file__).parents[3] / "assets" / "interrupting_words.json"
_BETWEEN = re.compile(r"[^\w'-]+")
_WITHOUT_SPACES = frozenset({"ja", "ko", "zh"})


@dataclass(eq=False)
class VoiceWords:
    session: VoiceSession
    clock: Clock
    metrics: GatewayMetrics
    _task: asyncio.Task[None] | None = None

    @property
    def judging(self) -> bool:
        return self._task is not None and not self._task.done()

    def judge(
        self, pcm: npt.NDArray[np.int16], language: str | None, on_turn: Callable[[], None]
    ) -> None:
        """
        Args:
            pcm: [n] int16, 16 kHz, of the whole voice.
            language: of the speech; None: any.
            on_turn: called in the event loop.
        """
        if self.judging:
            self.metrics.voice_words.labels("busy").inc()
            return
        self._task = background(self._judge(pcm, language, on_turn), "voice words")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_WIND_DOWN_S)

    async def _judge(
        self, pcm: npt.NDArray[np.int16], language: str | None, on_turn: Callable[[], None]
    ) -> None:
        began_s = self.clock.now_s()
        outcomes = self.metrics.voice_words
        text = await text_of(self.session, (AudioPart(pcm),), language, outcomes)
        if text is None:
            return
        outcome = "none" if not text.strip() else "other"
        if takes_turn(text, language):
            outcome = "turn" if self.clock.now_s() - began_s <= _LATE_S else "late"
        outcomes.labels(outcome).inc()
        if outcome == "turn":
            on_turn()


def takes_turn(text: str, language: str | None = None) -> bool:
    """Whether a text begins with such a word.

    Args:
        language: of the speech, as a code such as "en" or "en-GB"; None or another one: any.
    """
    said = " ".join(_BETWEEN.sub(" ", text.casefold()).split()) + " "
    return said.startswith(_beginnings((language or "").casefold().split("-")[0]))


@cache
def _beginnings(code: str) -> tuple[str, ...]:
    by_language: dict[str, list[str]] = json.loads(_WORDS.read_text(encoding="utf-8"))
    codes = [code] if code in by_language else list(by_language)
    return tuple(
        word if each in _WITHOUT_SPACES else f"{word} "
        for each in codes
        for word in by_language[each]
    )
