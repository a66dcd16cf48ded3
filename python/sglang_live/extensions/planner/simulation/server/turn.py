"""One turn through the stages, as orchestrator/turn.py runs it.

The thinker's tokens open the talker's request and feed it, its frames feed the vocoder, and their
audio goes to the client. What is reported to the engines is decided by the server's TurnControl.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.extensions.planner.simulation.engine.requests import Request
from sglang_live.extensions.planner.simulation.events import Events
from sglang_live.extensions.planner.simulation.server.playback import GatewayPlayback
from sglang_live.extensions.planner.simulation.server.replicas import (
    EngineReplica,
    Replica,
    ThinkerReplica,
    VocoderReplica,
)
from sglang_live.extensions.planner.simulation.server.session import Session
from sglang_live.extensions.planner.simulation.server.sessions import TALKER_PREFIX_TOKENS
from sglang_live.extensions.planner.simulation.server.vocoder import VocoderJob
from sglang_live.orchestrator.stage_jobs import TalkerJob, ThinkerJob
from sglang_live.orchestrator.stage_jobs import VocoderJob as ServerVocoderJob
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import FRAME_S

# A response lacks the first column of each upsampling convolution (models/qwen3_omni/code2wav.py,
# strides 8, 5, 4 and 3): 555 samples at 24 kHz, of its first chunk.
MISSING_S = (8 * 60 + 5 * 12 + 4 * 3 + 3) / 24_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """
    audio_s: the user's utterance. n_tokens, n_frames: the response, drawn before the run.
    """

    audio_s: float
    n_tokens: int
    n_frames: int


class Stages(Protocol):
    """What a turn needs of its server."""

    @property
    def events(self) -> Events: ...

    @property
    def policies(self) -> Policies: ...

    def audio_came(self, turn: "Turn", audio_s: float) -> None: ...

    def audio_complete(self, turn: "Turn") -> None: ...

    def end_thinker(self, turn: "Turn", *, keeps_kv: bool) -> None: ...

    def cancel_talker(self, turn: "Turn") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The replicas that a session stays with."""

    thinker: ThinkerReplica
    talker: EngineReplica
    vocoder: VocoderReplica

    @property
    def every(self) -> tuple[Replica, ...]:
        return self.thinker, self.talker, self.vocoder

    @property
    def are_up(self) -> bool:
        return all(replica.is_up for replica in self.every)


class Listening:
    """What the client has of a response. Times are those of the simulation.

    Attributes:
        done_s: when response.done came; None: it has not.
        packets: audio packets.
    """

    def __init__(self, events: Events, changed: Callable[[], None]):
        self._events = events
        self.changed = changed
        self.created_s = events.now_s()
        self.playback = PlaybackClock(events)
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.flushed_s: float | None = None
        self.done_s: float | None = None
        self.status: str | None = None
        self.packets = 0

    def audio(self, audio_s: float) -> None:
        now_s = self._events.now_s()
        self.last_s = now_s
        self.packets += 1
        self.playback.packet_received(audio_s)
        if self.first_s is None:
            self.first_s = now_s
            self.changed()

    def done(self, status: str) -> None:
        self.done_s = self._events.now_s()
        self.status = status
        self.changed()

    def flush(self) -> None:
        if not self.playback.flushed:
            self.playback.flush()
            self.flushed_s = self._events.now_s()

    @property
    def is_playing(self) -> bool:
        if self.first_s is None or self.playback.flushed:
            return False
        return self.done_s is None or self.playback.buffered_s > 0

    @property
    def heard_s(self) -> float:
        flushed = self.playback.flushed
        return self.playback.heard_s if flushed else self.playback.received_s


class _Job:
    """A stage's job as TurnControl sees it."""

    def __init__(
        self,
        report: Callable[[float, bool], None],
        interrupt: Callable[[], None],
        cancel: Callable[[], None],
    ):
        self.report = report
        self.interrupt = interrupt
        self.cancel = cancel


class Turn:
    """
    Attributes:
        n_tokens, n_frames: of the thinker and the talker so far.
        is_over: the response is over for the client; the thinker may still end its request.
    """

    def __init__(
        self,
        server: Stages,
        session: Session,
        places: Places,
        spec: TurnSpec,
        listening: Listening,
        number: int,
    ):
        self.server = server
        self.session = session
        self.places = places
        self.spec = spec
        self.listening = listening
        self.rid = f"{session.session_id}.{number:06d}"
        self.n_tokens = self.n_frames = self.n_heard_tokens = 0
        self.is_over = self.thinker_ended = False
        self.deadline: int | None = None
        self.thinker: Request | None = None
        self.talker: Request | None = None
        self.vocoder = VocoderJob(self._chunk, self._audio_complete)
        self.control = TurnControl(server.policies, server.events)
        self.playback = GatewayPlayback(server.events, self._heard)
        self.control.attach(
            cast(ThinkerJob, _Job(self._to_thinker, self._interrupt_thinker, _nothing)),
            cast(TalkerJob, _Job(self._to_talker, _nothing, self._cancel_talker)),
            cast(ServerVocoderJob, _Job(_no_report, _nothing, self._cancel_vocoder)),
        )

    @property
    def per_token_s(self) -> float:
        """Speech of one token."""
        return self.spec.n_frames * FRAME_S / self.spec.n_tokens

    # --- forward ---

    def talker_request(self, n_user: int, reserve: int) -> Request:
        """The talker's request, when n_user tokens of its prompt are not in its radix tree."""
        n_prompt = self.session.talker_prompt + TALKER_PREFIX_TOKENS
        return Request(
            rid=f"speak-{self.rid}",
            prompt_tokens=n_prompt,
            cached_tokens=n_prompt - n_user - TALKER_PREFIX_TOKENS,
            max_new=self.spec.n_frames + 1,
            reserve=reserve,
            owner=self,
            n_text=1 if self.spec.n_tokens > 1 else math.inf,
        )

    def frame_came(self) -> None:
        """The talker's frames so far are in the server's process."""
        self.control.frames_came(self.n_frames)

    def _chunk(self, n_frames: int) -> None:
        missing_s = MISSING_S if self.vocoder.n_emitted == 1 else 0.0
        self.server.audio_came(self, n_frames * FRAME_S - missing_s)

    def _audio_complete(self) -> None:
        self.server.audio_complete(self)

    # --- reports ---

    def _heard(self, heard_s: float, plays: bool) -> None:
        if not self.is_over:
            self.control.heard(heard_s, plays)

    def _to_thinker(self, heard_s: float, advancing: bool) -> None:
        if self.thinker is not None and not self.thinker.is_finished:
            self.places.thinker.feed.put(self.thinker.rid, heard_s, advancing)

    def _to_talker(self, heard_s: float, advancing: bool) -> None:
        if self.talker is not None and not self.talker.is_finished:
            self.places.talker.feed.put(self.talker.rid, heard_s, advancing)

    # --- interruption ---

    def _interrupt_thinker(self) -> None:
        self.server.end_thinker(self, keeps_kv=True)

    def _cancel_talker(self) -> None:
        self.server.cancel_talker(self)

    def _cancel_vocoder(self) -> None:
        self.places.vocoder.vocoder.cancel(self.vocoder)


def _nothing() -> None:
    """A stage that is not told."""


def _no_report(_heard_s: float, _advancing: bool) -> None:
    """A vocoder gets no reports."""
