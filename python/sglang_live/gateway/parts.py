"""What a gateway is built of, and what may be added to it beside its own routes.

Owner: one GatewayParts per process, which all routes and realtime connections share.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from sglang_live.aio import background, lasting
from sglang_live.capacity.control import Capacity
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.errors import CapacityError, LiveError
from sglang_live.gateway.auth import Keys
from sglang_live.gateway.call.context_limit import ContextLimit
from sglang_live.gateway.call.conversation.conversation import ItemBudget
from sglang_live.gateway.call.resumption import ResumableCalls
from sglang_live.gateway.chat.messages import SpokenAnswers
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.errors import error_response
from sglang_live.gateway.flex.gate import FlexGate
from sglang_live.gateway.flex.tier import Tiers
from sglang_live.gateway.model import CUSTOM_VOICE, CustomVoices, check_model, known_voice
from sglang_live.gateway.rate_limits import OpenSessions, OutOfBandSlots, RateLimits
from sglang_live.ids import new_id
from sglang_live.interaction.endpoint import EndpointModel, EndpointThreads
from sglang_live.interaction.filters.other_voices import OtherVoices, SpeakerThread
from sglang_live.interaction.filters.voiceprint import SpeakerModel
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SpeechModel
from sglang_live.interaction.user_stats import UserPrior
from sglang_live.orchestrator.sessions import Orchestrator, VoiceSession
from sglang_live.orchestrator.suspects import Suspects
from sglang_live.telemetry.metrics import GatewayMetrics
from sglang_live.telemetry.trace import StageSpans

if TYPE_CHECKING:  # the first is made of these parts; the others need their flags
    from sglang_live.gateway.native.proxy import NativeProxy
    from sglang_live.gateway.shared_limits import SharedLimits
    from sglang_live.journal.journal import Journal

Endpoint = Callable[[Request], Awaitable[Response]]


# --- how late the event loop is, and the refusal of sessions that would make it later ---
# Every microphone costs the loop some CPU time, whether its user speaks or not. With more of them
# than one core serves, audio waits in the sockets, and all users are heard later and later: no
# event fails. The mean delay of a timer shows it.


_PERIOD_S = 0.05
# Time constant of the mean. A single stall of the process, up to a second, refuses no session.
_MEMORY_S = 5.0
_RETRY_AFTER_S = 5.0
_WHY = "The server cannot listen to more users now."


class LoopLag:
    """
    limit_s: mean lag at which new sessions are refused; None: they never are.
    """

    def __init__(self, clock: Clock, metrics: GatewayMetrics, limit_s: float | None):
        self._clock = clock
        self._metrics = metrics
        self._limit_s = limit_s
        self.mean_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = background(lasting(self._watch, "loop lag", self._clock), "loop lag")

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def check(self) -> None:
        """Raises CapacityError if open sessions already use the time that a new one would need."""
        if self._is_over:
            raise CapacityError(_WHY, retry_after_s=_RETRY_AFTER_S)

    def limited(self, capacity: Capacity) -> Capacity:
        """The same, without room for more sessions if they would be refused here."""
        return replace(capacity, n_more=0, why=_WHY) if self._is_over else capacity

    @property
    def _is_over(self) -> bool:
        return self._limit_s is not None and self.mean_s > self._limit_s

    def observe(self, lag_s: float) -> None:
        """Enter how late a timer of _PERIOD_S was."""
        share = -math.expm1(-(_PERIOD_S + lag_s) / _MEMORY_S)
        self.mean_s += share * (lag_s - self.mean_s)
        self._metrics.loop_lag_s.set(self.mean_s)

    async def _watch(self) -> None:
        while True:
            due_s = self._clock.now_s() + _PERIOD_S
            await self._clock.sleep(_PERIOD_S)
            self.observe(max(0.0, self._clock.now_s() - due_s))


@dataclass(slots=True, kw_only=True)
class GatewayParts:
    """
    endpoint_model: judges turns for semantic_vad; None: silence alone ends turns.
    speaker_model: tells the user's voice from others; None: all voices are the user's.
    suspects: requests that were running when an engine died.
    answers: to which the messages of chats may refer.
    proxy: to SGLang's own API; None: this server has none.
    shared: with other gateways; None: this one knows of none.
    flex: bound on flex requests.
    echo_thread: where microphones are compared with what was played.
    journal: of calls, for other gateways; None: calls end with this one.
    custom_voices: None: clients can make none.
    """

    orchestrator: Orchestrator
    config: GatewayConfig
    speech_model: SpeechModel
    endpoint_model: EndpointModel | None = None
    speaker_model: SpeakerModel | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    metrics: GatewayMetrics = field(default_factory=lambda: GatewayMetrics(CollectorRegistry()))
    drain: Drain = field(default_factory=Drain)
    suspects: Suspects = field(default_factory=lambda: Suspects(MonotonicClock()))
    answers: SpokenAnswers = field(default_factory=SpokenAnswers)
    user_prior: UserPrior = field(default_factory=UserPrior)
    proxy: "NativeProxy | None" = None
    journal: "Journal | None" = None
    shared: "SharedLimits | None" = None
    custom_voices: CustomVoices | None = None
    stage_spans: StageSpans = field(default_factory=StageSpans)
    keys: Keys = field(init=False)
    tiers: Tiers = field(init=False)
    flex: FlexGate = field(init=False)
    rate_limits: RateLimits = field(init=False)
    open_sessions: OpenSessions = field(init=False)
    resumable_calls: ResumableCalls = field(init=False)
    out_of_band_slots: OutOfBandSlots = field(init=False)
    item_budget: ItemBudget = field(init=False)
    context_limit: ContextLimit = field(init=False)
    loop_lag: LoopLag = field(init=False)
    scorer: SpeechScorer = field(init=False)
    endpoint: EndpointThreads | None = field(init=False)
    speaker_thread: SpeakerThread | None = field(init=False)
    echo_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="echo")
    )

    def __post_init__(self) -> None:
        config, metrics = self.config, self.metrics
        self.keys = Keys(config.keys.accepted)
        self.tiers = Tiers(config.keys.batch_only_keys)
        self.flex = FlexGate(config.flex, lambda how: metrics.flex_requests.labels(how).inc())
        metrics.flex_running.set_function(lambda: self.flex.n_running)
        metrics.flex_waiting.set_function(lambda: self.flex.n_waiting)
        limits = config.limits
        self.rate_limits = RateLimits(limits.max_responses_per_minute, self.clock, limits.gateways)
        self.open_sessions = OpenSessions(limits)
        self.resumable_calls = ResumableCalls(
            config.sessions.resume_log_bytes, config.sessions.resume_log_bytes_of_all
        )
        self.out_of_band_slots = OutOfBandSlots(config.sessions.max_out_of_band_responses_in_all)
        self.item_budget = ItemBudget(config.sessions.max_conversation_bytes_of_all)
        self.context_limit = ContextLimit(self.orchestrator, metrics)
        self.loop_lag = LoopLag(self.clock, metrics, config.sessions.max_loop_lag_s)
        self.scorer = SpeechScorer(self.speech_model)
        model = self.endpoint_model
        self.endpoint = EndpointThreads(model) if model else None
        speaker = self.speaker_model
        self.speaker_thread = SpeakerThread(speaker) if speaker else None

    def check_model(self, name: str | None, at: str = "model", *, stock: bool = False) -> None:
        """See gateway/model.py; an operator's other names are names of the served model, too."""
        served, aliases = self.orchestrator.model_name, self.config.model.aliases
        check_model(served, name, at, stock=stock, aliases=aliases)

    def voices_of(self, owner: str) -> tuple[str, ...]:
        """By which the owner's responses may be spoken; the first is the default."""
        custom = self.custom_voices.names(owner) if self.custom_voices else ()
        return (*self.orchestrator.voices, *(voice for voice, _ in custom))

    def voice_of(self, owner: str, name: str | None, at: str = "voice") -> str:
        """See gateway/model.py: known_voice."""
        return known_voice(self.voices_of(owner), name, at)

    def speaker_of(self, owner: str, voice: str) -> bytes:
        """See TurnRequest.speaker."""
        return self.custom_voices.speaker(owner, voice) if self.custom_voices else b""

    def turn_voice(self, owner: str, name: str) -> tuple[str, bytes]:
        """The voice of a turn and its speaker. One that is deleted is refused by the talker: a turn
        that nothing is heard of may begin with it."""
        if speaker := self.speaker_of(owner, name):
            return name, speaker
        if self.custom_voices is not None and name.startswith(CUSTOM_VOICE):
            return name, b""
        return known_voice(self.orchestrator.voices, name), b""

    @asynccontextmanager
    async def brief_session(self, kind: str, *, flex: bool) -> AsyncIterator[VoiceSession]:
        """A session that lasts as long as the context.

        Args:
            kind: prefix of its id.
            flex: it is for a flex request: admission counts no session, the gate has a place.
        Raises:
            CapacityError: the server is full.
            FlexBusyError: there are too many flex requests.
            StageUnavailableError: a stage is down.
        """
        async with self.flex.place() if flex else nullcontext():
            session = await self.orchestrator.open_session(new_id(kind), admitted=not flex)
            try:
                yield session
            finally:
                await session.close()

    def other_voices(self) -> tuple[OtherVoices, ...]:
        """For one session; () without a speaker model."""
        thread = self.speaker_thread
        return (OtherVoices(thread, self.clock, self.metrics),) if thread else ()

    def start(self) -> None:
        """In the event loop that serves."""
        self.loop_lag.start()

    def close(self) -> None:
        self.loop_lag.close()
        self.scorer.close()
        self.echo_thread.shutdown(wait=False, cancel_futures=True)
        if self.endpoint:
            self.endpoint.close()
        if self.speaker_thread:
            self.speaker_thread.close()


class GatewayAddition:
    """
    Attributes:
        routes: by path and method, for requests with a key of the server.
        paths: that /openapi.json describes. schemas: that they refer to.
    """

    routes: Mapping[tuple[str, str], Endpoint] = {}
    paths: Mapping[str, Any] = {}
    schemas: Mapping[str, Any] = {}

    def start(self) -> None:
        """When the application starts."""

    async def close(self) -> None:
        """When it ends."""


def refusing(error: LiveError) -> Endpoint:
    async def refuse(_request: Request) -> Response:
        return error_response(error)

    return refuse
