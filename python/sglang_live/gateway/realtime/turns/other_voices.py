"""Whose voice is heard over a response: the session's user's, or another person's.

In: windows of the microphone, turns of the user. Out: `unsure`, `near` to the user or `far`.
Owner: one SpeakerThread per process, one OtherVoices per connection.

A comparison that is not done in time is no evidence: the voice is then taken as without it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.voiceprint import (
    Floats,
    HeardVoice,
    Pcm,
    SpeakerModel,
    State,
    Voiceprint,
    parts_of,
)
from sglang_live.telemetry.metrics import GatewayMetrics

log = logging.getLogger(__name__)

# Later a voice would have to wait for its comparison for longer than the response is held.
_PATIENCE_S = 0.1
# The user's next voice over a response comes later than this.
_LEARNING_S = 2.0
# Parts of a turn that are embedded at once, 20 ms, for which comparisons of others wait.
_BATCH = 5


@dataclass(eq=False)
class SpeakerThread:
    """Embeddings, computed beside the event loop, one after another.

    patience_s: a comparison that takes longer is no evidence.
    """

    model: SpeakerModel
    patience_s: float = _PATIENCE_S
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speaker")

    async def embed(
        self, sounds: Sequence[Pcm], lengths: Sequence[int], patience_s: float
    ) -> Floats:
        """As SpeakerModel.embed.

        Raises:
            TimeoutError: it has not been computed within patience_s.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(patience_s):  # what has not begun is then cancelled
            return await loop.run_in_executor(self._thread, self.model.embed, sounds, lengths)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class OtherVoices:
    def __init__(self, thread: SpeakerThread, clock: Clock, metrics: GatewayMetrics) -> None:
        self._thread, self._clock, self._metrics = thread, clock, metrics
        self._voiceprint, self._heard = Voiceprint(), HeardVoice()
        self._learning: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        return self._heard.state

    @property
    def is_certain(self) -> bool:
        """Whether the present voice is the user's by more than its first sounds."""
        return self._heard.is_certain

    @property
    def outlast_ms(self) -> int:
        """Voice that must be heard before it is a turn; 0: what there is is enough."""
        return self._heard.outlast_ms if self._voiceprint.is_known else 0

    @property
    def voiced_ms(self) -> int:
        """Length of the present voice."""
        return self._heard.voiced_ms

    def forget(self) -> None:
        """The next voice is a new one."""
        self._heard.forget()

    async def hear(self, pcm: Pcm, is_voice: npt.NDArray[np.bool_]) -> State:
        """The next windows: [n * WINDOW_SAMPLES] int16; [n]. Returns whose voice it is."""
        if not self._voiceprint.is_known:
            return "unsure"
        self._heard.hear(pcm.reshape(-1, WINDOW_SAMPLES), is_voice)
        while (due := self._heard.due(self._voiceprint.longest)) is not None:
            await self._compare(due)
        return self._heard.state

    @property
    def known(self) -> Voiceprint:
        """The user's voice as it is known now."""
        return self._voiceprint.copy()

    def is_turn(
        self, pcm: Pcm, known: Voiceprint, has_speech: Callable[[Pcm], bool] | None
    ) -> bool:
        """Whether a turn is one of the user; takes tens of ms, in any thread.

        Args:
            pcm: [n] int16.
            known: as it was at the end of the turn.
            has_speech: what else the turn must fulfil; None: nothing.
        """
        if has_speech is not None and not has_speech(pcm):
            return False
        parts, lengths = parts_of(pcm)
        if not parts or not known.is_known:
            return True
        try:
            own = known.is_of_user(self._thread.model.embed(parts, lengths))
        except Exception:
            log.exception("speaker_model_failed")
            return True
        if not own:
            self._metrics.other_turns.inc()
        return own

    def learn(self, pcm: Pcm, of_user_only: bool) -> None:
        """A turn: [n] int16. of_user_only: one of another person teaches nothing."""
        task = background(self._learn(pcm, of_user_only), "voice of the user")
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    def close(self) -> None:
        for task in self._learning:
            task.cancel()

    async def _compare(self, due: Pcm) -> None:
        began_s, similarity, outcome = self._clock.now_s(), None, None
        try:
            [[embedding]] = await self._thread.embed([due], (), self._thread.patience_s)
            similarity = self._voiceprint.similarity(len(due) // WINDOW_SAMPLES, embedding)
        except TimeoutError:
            outcome = "late"
        except Exception:
            log.exception("speaker_model_failed")
            outcome = "failed"
        self._heard.compared(similarity)
        self._metrics.voice_comparisons.labels(outcome or self._heard.state).inc()
        self._metrics.voice_comparison_s.observe(self._clock.now_s() - began_s)

    async def _learn(self, pcm: Pcm, of_user_only: bool) -> None:
        parts, lengths = parts_of(pcm)
        if not parts:
            self._metrics.voices_learnt.labels("short").inc()
            return
        outcome = "learnt"
        try:
            embeddings = np.concatenate(
                [
                    await self._thread.embed(parts[at : at + _BATCH], lengths, _LEARNING_S)
                    for at in range(0, len(parts), _BATCH)
                ],
                axis=1,
            )
            if not of_user_only or self._voiceprint.is_of_user(embeddings):
                self._voiceprint.learn(embeddings)
            else:
                outcome = "other"
        except TimeoutError:
            outcome = "late"
        except Exception:
            log.exception("speaker_model_failed")
            outcome = "failed"
        self._metrics.voices_learnt.labels(outcome).inc()
