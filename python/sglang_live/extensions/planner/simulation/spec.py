"""What a simulated server is given: device, memory, and the times that a device model lacks."""

from dataclasses import asdict, dataclass, field

from sglang_live.extensions.planner.device_model.model import DeviceModel
from sglang_live.extensions.planner.simulation.engine.engine import EngineSpec
from sglang_live.extensions.planner.simulation.engine.tiers import TierSpec
from sglang_live.extensions.planner.simulation.placement import SHARED, DividedCosts, Placement
from sglang_live.extensions.planner.simulation.sharing import Sharing
from sglang_live.policy.config import TALKER, THINKER, PolicyConfig
from sglang_live.policy.policies import Policies
from sglang_live.stages.vocoder.config import VocoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of Python, transport and audio features, which a device model does not have.

    Measured as the difference of spans and computed costs in
    benchmark/results/modelled_turn/cpu_2026-11-26.json, on two cores:
        to_thinker_s: from the end of the turn to the thinker's engine, without features. There it
            is 33 ms with those of a clip of 2.64 s and the opening of the session, whose header
            costs the device 15 ms.
        to_talker_s: from the thinker's first token to the talker's engine.
        to_client_s: from the talker's frame to the client, without the vocoder's time.
        text_s, report_s: of further tokens, and of reports; parts of the same way.
    The least of 30 to 60 spans of a thinker alone, less its device's time, on two busy cores:
        answer_s: of a message to the engine and its answer.
        result_s: of a request without a response, beside its batch.
        features_per_s: for a second of a clip.
    launch_s: from the choice of a batch to its begin on the device, if that is free by then.
        Estimated: a token of a thinker of seven million parameters takes 2.8 ms on an H100, with
        overlap, which is SGLang's loop alone (benchmark/results/gpu).
    round_s: of a scheduler, or of the vocoder's thread, for each batch, beside the device; 0: it
        is hidden by it.
    """

    to_thinker_s: float = 0.0065
    answer_s: float = 0.001
    result_s: float = 0.003
    features_per_s: float = 0.0029
    to_talker_s: float = 0.0155
    to_client_s: float = 0.010
    text_s: float = 0.005
    report_s: float = 0.005
    launch_s: float = 0.002
    thinker_round_s: float = 0.0
    talker_round_s: float = 0.0
    vocoder_round_s: float = 0.0

    def divided(self, divisor: float) -> "HostTimes":
        """As a clock measures them that runs at 1/divisor of real time."""
        return HostTimes(**{name: value / divisor for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """
    sharing: how the processes of a device that several stages use have it.
    thinker_tokens, talker_tokens: KV pool of each replica.
    header_tokens: of the instructions.
    host_tokens: of a thinker's KV in host memory, with the policy next-use.
    chunk_tokens: of a prefill of either engine.
    overlap: of scheduler and device, in both engines.
    stateless: each turn is one request with the whole conversation. The radix tree has what was
        generated, so that it computes what is behind the heard part. Only the new clip's features
        are computed, which flatters it: SGLang computes those of all clips.
    first_audio_s: budget that admission gives a first audio (--admission-first-audio-ms).
    thinker_reserves_all: see EngineSpec.
    max_running_requests: in each engine at once, as SGLang's flag; 0: as many as sessions.
    speculate_ms: as TurnConfig; with the policy truncate, whose arms have speculative turns.
    thinker_policy, talker_policy: constants of the policies, for experiments.
    """

    model: DeviceModel
    placement: Placement = SHARED
    sharing: Sharing = "queue"
    thinker_tokens: int = 200_000
    talker_tokens: int = 100_000
    host_tokens: int = 0
    header_tokens: int = 200
    chunk_tokens: int = 8192
    overlap: bool = True
    stateless: bool = False
    thinker_reserves_all: bool = False
    max_running_requests: int = 0
    max_sessions: int = 64
    first_audio_s: float = 1.0
    speculate_ms: int | None = None
    vocoder: VocoderConfig = field(default_factory=VocoderConfig)
    host: HostTimes = field(default_factory=HostTimes)
    thinker_policy: PolicyConfig = THINKER
    talker_policy: PolicyConfig = TALKER

    def thinker(self, device: int) -> EngineSpec:
        tp, whole = self.placement.thinker_tp, self.model.thinker
        return EngineSpec(
            name="thinker",
            costs=whole if tp == 1 else DividedCosts(whole=whole, n_devices=tp),
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
            host_s=self.host.thinker_round_s,
            launch_s=self.host.launch_s,
            reserves_all=self.thinker_reserves_all,
        )

    @property
    def talker(self) -> EngineSpec:
        return EngineSpec(
            name="talker",
            costs=self.model.talker,
            chunk_tokens=self.chunk_tokens,
            overlap=self.overlap,
            host_s=self.host.talker_round_s,
            launch_s=self.host.launch_s,
        )

    def tier(self, policies: Policies) -> TierSpec:
        return TierSpec(
            link=self.model.link,
            token_bytes=self.model.thinker.kv_token_bytes,
            host_tokens=self.host_tokens,
            preloads=policies.preload,
        )
