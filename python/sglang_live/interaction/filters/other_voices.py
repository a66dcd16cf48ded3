"""Other voices: whose voice is heard over a response, the session's user's or another person's.

In: windows of the microphone, turns of the user. Out: their scores, 0 for another person's voice.
Owner: one SpeakerThread per process, one OtherVoices per connection.

A comparison that is not done in time is no evidence: the voice is then taken as without it.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from sglang_live.aio import background
from sglang_live.clock import Clock
from sglang_live.interaction.filters.voice_filter import (
    Found,
    Frame,
    Pcm,
    Scores,
    TurnCheck,
    VoiceFilter,
)
from sglang_live.interaction.filters.voiceprint import (
    Floats,
    HeardVoice,
    SpeakerModel,
    State,
    Voiceprint,
    parts_of,
)
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection
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


class OtherVoices(VoiceFilter):
    def __init__(self, thread: SpeakerThread, clock: Clock, metrics: GatewayMetrics) -> None:
        self._thread = thread
        self._clock = clock
        self._metrics = metrics
        self._voiceprint = Voiceprint()
        self._heard = HeardVoice()
        self._learns = False
        self._judges_turns = False
        self._learning: set[asyncio.Task[None]] = set()

    def configure(self, detection: TurnDetection) -> bool:
        self._learns = detection.knows_user
        self._judges_turns = detection.ignore_other_turns
        return detection.ignore_other_voices and detection.vad.confirm_ms > 0

    async def filtered(self, frame: Frame, scores: Scores) -> Scores:
        if not frame.over_response or not len(frame.pcm):
            return scores
        before = self._heard.state
        is_voice = scores >= frame.threshold
        state = await self.hear(frame.pcm, is_voice)
        frame.is_known = state == "far" or self._heard.is_certain
        if state != "far":
            return scores
        if before != "far":
            self.is_undecided = False
            frame.found.append(Found("other_voice", "far", is_whole=True))
        return np.where(is_voice, np.float32(0), scores)

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

    def outlast_ms(self, frame: Frame, scores: Scores, so_far_ms: int) -> int:
        """A voice whose speaker is not known yet must last until they are."""
        needed_ms = max(frame.detection.vad.confirm_ms, so_far_ms)
        waits_ms = self._heard.outlast_ms if self._voiceprint.is_known else 0
        self.is_undecided = waits_ms > needed_ms and self._heard.voiced_ms >= needed_ms
        return max(so_far_ms, waits_ms)

    def forget(self) -> None:
        self._heard.forget()
        self.is_undecided = False

    def learn(self, turn: Pcm) -> None:
        if not self._learns:
            return
        task = background(self._learn(turn, self._judges_turns), "voice of the user")
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    def turn_checks(self) -> tuple[TurnCheck, ...]:
        # By the voice as it is known now: what the turn teaches is not known yet.
        return (partial(self._is_turn, known=self.known),) if self._judges_turns else ()

    def close(self) -> None:
        for task in self._learning:
            task.cancel()

    def _is_turn(self, pcm: Pcm, known: Voiceprint) -> bool:
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

    async def _compare(self, due: Pcm) -> None:
        began_s = self._clock.now_s()
        similarity: float | None = None
        outcome: str | None = None
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
