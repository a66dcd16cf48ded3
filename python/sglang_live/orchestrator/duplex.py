"""A call with a model that hears while it speaks: frames of the user in, frames of the model out.

In: the user's sound, a frame at a time, as it comes. Out: as many frames of sound and text.
Owner: one DuplexCall per session whose mode is on. It has three jobs for as long as it lasts: the
vocoder encodes the user, the talker steps, the vocoder decodes what it says.

Clocks. The period begins with the user's first frame. A frame that is a whole period late is
silence, which is encoded as any sound, and one that comes for a period that is over is dropped. A
server that is late steps back to back; behind by MOST_BEHIND periods frames of the user are
dropped, never steps.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Protocol

from sglang_live import ids
from sglang_live.aio import result_with
from sglang_live.clock import Clock
from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import StageUnavailableError
from sglang_live.messages import (
    AnyMessage,
    DuplexFrames,
    DuplexRequest,
    HeardFrame,
    HearRequest,
    Pcm,
    UserSound,
    VocoderFrames,
    VocoderRequest,
)
from sglang_live.orchestrator.metronome import Metronome
from sglang_live.orchestrator.stage_links import StageLinks, TalkerLink
from sglang_live.stages.transport.client import Job

log = logging.getLogger(__name__)

# Frames of the user that may come before their period: clients send several at once.
MOST_EARLY = 4
# Periods that the server may be late before it drops frames of the user.
MOST_BEHIND = 4
# Frames of both sides that another engine gets after a stage's end: a minute.
KEPT_FRAMES = 750
# No job is to end by itself: a day, and a session lasts shorter.
TIMEOUT_S = 24 * 3600.0
# Of a stage that has ended, until it is up again.
_RESTART_S, _RETRY_S = 120.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplexSettings:
    """See messages.DuplexRequest. frame_s: of a frame."""

    frame_s: float
    voice: str
    role: str
    temperature: float | None
    seed: int
    window_frames: int | None = None


@dataclass(frozen=True, slots=True)
class SpokenFrame:
    """
    pcm: int16 little-endian mono at OUTPUT_RATE_HZ, of one frame.
    text: that the model has written with it.
    latency_s: since the user's frame came that led to it. None: silence did.
    """

    pcm: bytes
    text: str
    latency_s: float | None


class FrameDeadlines(Protocol):
    """As admission counts them; see CapacityControl."""

    def begin(self) -> int: ...

    def came(self, deadline: int) -> None: ...

    def failed(self, deadline: int) -> None: ...

    def abandoned(self, deadline: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Came:
    """A frame of the user: when it came, and until when it is to be answered."""

    at_s: float
    deadline: int


class DuplexCall:
    """
    Attributes:
        n_missing: frames of the user that were silence instead.
        n_late: that were dropped because their period was over.
        n_dropped: that were dropped because the server was behind.
        n_restarts: times that a stage has ended.
    """

    def __init__(
        self,
        name: str,
        links: StageLinks,
        settings: DuplexSettings,
        clock: Clock,
        metronome: Metronome,
        deadlines: FrameDeadlines,
        place: Callable[[], None],
    ):
        """
        Args:
            name: of its jobs.
            place: finds replicas in the place of those that are down.
        """
        assert isinstance(links.talker, TalkerLink)
        self._name, self._links, self._settings = name, links, settings
        self._talker = links.talker
        self._clock, self._metronome, self._place = clock, metronome, place
        self._deadlines = deadlines
        self._silence = bytes(2 * round(settings.frame_s * OUTPUT_RATE_HZ))
        self._began_s: float | None = None  # of the user's first period
        self._n_fed = 0
        self._n_heard = 0
        self._n_stepped = 0
        # Sound of the user with the time at which it came, until a tick.
        self._waiting: deque[tuple[bytes, _Came | None]] = deque()
        self._came = asyncio.Event()
        # Of frames that are on their way, when the user's sound came; and then their text.
        self._stepping: deque[_Came | None] = deque()
        self._sounding: deque[tuple[str, _Came | None]] = deque()
        self._own: deque[bytes] = deque(maxlen=KEPT_FRAMES)
        self._heard: deque[bytes] = deque(maxlen=KEPT_FRAMES + 64)
        self.n_missing = self.n_late = self.n_dropped = self.n_restarts = 0

    # --- the user ---

    def hear(self, pcm: bytes) -> bool:
        """Take the user's next frame. Returns False if it is dropped."""
        now_s = self._clock.now_s()
        if self._began_s is None:
            self._began_s = now_s
        if self._is_behind(now_s):
            self.n_dropped += 1
            self._began_s += self._settings.frame_s  # its period is left out
            return False
        if self.n_early > MOST_EARLY:
            self.n_late += 1
            return False
        self._feed(pcm, _Came(now_s, self._deadlines.begin()))
        return True

    @property
    def waits(self) -> bool:
        """Whether the period begins with the user's next frame: at first, and after a stage's end.
        Until then nothing is heard, not even silence."""
        return self._began_s is None

    @property
    def n_early(self) -> float:
        """Frames that were heard before their period."""
        return 0.0 if self.waits else self._n_fed - self._periods(self._clock.now_s())

    def _periods(self, now_s: float) -> float:
        """That have begun since the user's first frame."""
        assert self._began_s is not None
        return (now_s - self._began_s) / self._settings.frame_s

    def _is_behind(self, now_s: float) -> bool:
        return self._periods(now_s) - self._n_stepped >= MOST_BEHIND and (
            self._n_fed > self._n_stepped
        )

    def _feed(self, pcm: bytes, came: "_Came | None") -> None:
        self._n_fed += 1
        self._waiting.append((pcm, came))
        self._came.set()

    async def _watch_for_silence(self) -> None:
        """Feed silence in the place of frames that are a period late."""
        frame_s = self._settings.frame_s
        while True:
            if self._began_s is None:
                await self._clock.sleep(frame_s)
                continue
            due_s = self._began_s + (self._n_fed + 1) * frame_s
            if (left_s := due_s - self._clock.now_s()) > 0:
                await self._clock.sleep(left_s)
                continue
            if self._is_behind(self._clock.now_s()):
                self._began_s += frame_s
                continue
            self.n_missing += 1
            self._feed(self._silence, None)

    # --- the model ---

    async def run(self) -> AsyncGenerator[SpokenFrame, None]:
        """The model's frames, until it is closed.

        Raises:
            LiveError: the call cannot go on.
        """
        lost_s: float | None = None
        while True:
            try:
                async with aclosing(self._run_once()) as frames:
                    async for frame in frames:
                        lost_s = None
                        yield frame
            except (GeneratorExit, asyncio.CancelledError):
                self._end_deadlines(self._deadlines.abandoned)
                raise
            except StageUnavailableError as error:
                now_s = self._clock.now_s()
                if lost_s is None:
                    lost_s = now_s
                    self.n_restarts += 1
                    log.warning("duplex_lost call=%s error=%s", self._name, error)
                if now_s - lost_s > _RESTART_S:
                    raise
                await self._clock.sleep(_RETRY_S)
                self._place()

    async def _run_once(self) -> AsyncGenerator[SpokenFrame, None]:
        """The same, until a stage ends. It begins with what was said and heard so far."""
        voice = self._links.vocoder.client()
        async with AsyncExitStack() as jobs:
            hear, talk, sound = [
                await jobs.enter_async_context(client.open(ids.job_of(self._name, part)))
                for client, part in (
                    (voice, "hear"),
                    (self._talker.client(), ids.SPEAK),
                    (voice, ids.VOICE),
                )
            ]
            await self._begin(hear, talk, sound)
            tasks = [
                asyncio.create_task(work)
                for work in (
                    self._watch_for_silence(),
                    self._pass_sound(hear),
                    self._pass_heard(hear, talk),
                    self._pass_spoken(talk, sound),
                )
            ]
            try:
                async with aclosing(self._sound(sound, tasks)) as frames:
                    async for frame in frames:
                        yield frame
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, hear: Job, talk: Job, sound: Job) -> None:
        settings, own = self._settings, list(self._own)
        if own:
            self._forget_unanswered()
        n_known = max(0, len(own) - 1)
        heard = list(self._heard)[-n_known:] if n_known else []
        await hear.begin(HearRequest(hear.job_id, TIMEOUT_S))
        await sound.begin(VocoderRequest(sound.job_id, TIMEOUT_S, each_frame=True))
        await talk.begin(
            DuplexRequest(
                talk.job_id,
                voice=settings.voice,
                role=settings.role,
                temperature=settings.temperature,
                seed=settings.seed,
                timeout_s=TIMEOUT_S,
                window_frames=settings.window_frames,
                own=b"".join(own),
                heard=b"".join(heard),
                n_frames=len(own),
            )
        )

    def _forget_unanswered(self) -> None:
        """What was on its way when a stage ended is lost. The period begins anew with the user's
        next frame."""
        for _ in range(self._n_heard - self._n_stepped):
            self._heard.pop()
        self._end_deadlines(self._deadlines.failed)
        for frames in (self._waiting, self._stepping, self._sounding):
            frames.clear()
        self._began_s = None
        self._n_fed = self._n_heard = self._n_stepped = 0

    def _end_deadlines(self, how: Callable[[int], None]) -> None:
        """Of the frames that are on their way."""
        coming = [came for _, came in (*self._waiting, *self._sounding)]
        for came in (*coming, *self._stepping):
            if came is not None:
                how(came.deadline)

    async def _pass_sound(self, hear: Job) -> None:
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            # All calls whose frames have come meanwhile step together.
            await self._metronome.tick(self._clock.now_s() + self._settings.frame_s)
            while self._waiting:
                pcm, came = self._waiting.popleft()
                self._stepping.append(came)
                await hear.send(UserSound(hear.job_id, pcm))

    async def _pass_heard(self, hear: Job, talk: Job) -> None:
        async for message, _ in hear.events():
            if isinstance(message, HeardFrame):
                self._heard.append(message.codes)
                self._n_heard += 1
                await talk.send(HeardFrame(talk.job_id, message.codes))

    async def _pass_spoken(self, talk: Job, sound: Job) -> None:
        is_first, text = not self._own, ""
        async for message, _ in talk.events():
            if not isinstance(message, DuplexFrames):
                continue
            self._own.append(message.frame)
            came = None
            if not is_first:
                self._n_stepped += 1
                came = self._stepping.popleft()
            is_first = False
            text += message.text
            if message.codes:
                self._sounding.append((text, came))
                text = ""
                await sound.send(VocoderFrames(sound.job_id, message.codes))

    async def _sound(
        self, sound: Job, tasks: list[asyncio.Task[None]]
    ) -> AsyncGenerator[SpokenFrame, None]:
        async def heard_next() -> AnyMessage:
            return (await anext(events))[0]

        async with aclosing(sound.events()) as events:
            while True:
                message = await result_with(heard_next(), *tasks)
                if isinstance(message, Pcm):
                    text, came = self._sounding.popleft()
                    latency_s = None
                    if came is not None:
                        latency_s = self._clock.now_s() - came.at_s
                        self._deadlines.came(came.deadline)
                    yield SpokenFrame(message.pcm, text, latency_s)
