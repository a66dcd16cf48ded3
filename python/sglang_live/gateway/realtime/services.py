"""State and models that all realtime connections of a process share."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from sglang_live.clock import Clock
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.rate_limits import OutOfBandSlots, RateLimits
from sglang_live.gateway.realtime.context_limit import ContextLimit
from sglang_live.gateway.realtime.item_budget import ItemBudget
from sglang_live.gateway.realtime.loop_lag import LoopLag
from sglang_live.gateway.realtime.turns.endpointing import Endpointing
from sglang_live.gateway.realtime.turns.other_voices import OtherVoices, SpeakerThread
from sglang_live.interaction.endpoint import EndpointModel
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SpeechModel
from sglang_live.interaction.user_stats import UserPrior
from sglang_live.interaction.voiceprint import SpeakerModel
from sglang_live.orchestrator.session import Orchestrator
from sglang_live.telemetry.metrics import GatewayMetrics


@dataclass(slots=True, kw_only=True)
class RealtimeServices:
    """
    endpoint_model: judges turns for semantic_vad; None: silence alone ends turns.
    speaker_model: tells the user's voice from others; None: all voices are the user's.
    echo_thread: where microphones are compared with what was played.
    """

    orchestrator: Orchestrator
    config: GatewayConfig
    speech_model: SpeechModel
    endpoint_model: EndpointModel | None = None
    speaker_model: SpeakerModel | None = None
    clock: Clock
    metrics: GatewayMetrics
    drain: Drain = field(default_factory=Drain)
    user_prior: UserPrior = field(default_factory=UserPrior)
    rate_limits: RateLimits = field(init=False)
    out_of_band_slots: OutOfBandSlots = field(init=False)
    item_budget: ItemBudget = field(init=False)
    context_limit: ContextLimit = field(init=False)
    loop_lag: LoopLag = field(init=False)
    scorer: SpeechScorer = field(init=False)
    endpointing: Endpointing | None = field(init=False)
    speaker_thread: SpeakerThread | None = field(init=False)
    echo_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="echo")
    )

    def __post_init__(self) -> None:
        self.rate_limits = RateLimits(self.config.max_responses_per_minute, self.clock)
        self.out_of_band_slots = OutOfBandSlots(self.config.max_out_of_band_responses_in_all)
        self.item_budget = ItemBudget(self.config.max_conversation_bytes_of_all)
        self.context_limit = ContextLimit(self.orchestrator, self.metrics)
        self.loop_lag = LoopLag(self.clock, self.metrics, self.config.max_loop_lag_s)
        self.scorer = SpeechScorer(self.speech_model)
        model = self.endpoint_model
        self.endpointing = Endpointing(model, self.clock, self.metrics) if model else None
        speaker = self.speaker_model
        self.speaker_thread = SpeakerThread(speaker) if speaker else None

    def other_voices(self) -> OtherVoices | None:
        """For one session; None without a speaker model."""
        thread = self.speaker_thread
        return OtherVoices(thread, self.clock, self.metrics) if thread else None

    def start(self) -> None:
        """In the event loop that serves."""
        self.loop_lag.start()

    def close(self) -> None:
        self.loop_lag.close()
        self.scorer.close()
        self.echo_thread.shutdown(wait=False, cancel_futures=True)
        if self.endpointing:
            self.endpointing.close()
        if self.speaker_thread:
            self.speaker_thread.close()
