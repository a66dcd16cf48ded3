"""Constants of a stage's policies, each beside the rule that reads it."""

from dataclasses import dataclass, field

from sglang_live.policy.admission import AdmissionConfig
from sglang_live.policy.arbiter import ArbiterConfig
from sglang_live.policy.deadline import DeadlineConfig
from sglang_live.policy.hybrid import BestEffortConfig
from sglang_live.policy.pacing import PacingConfig
from sglang_live.policy.prefill import PrefillConfig
from sglang_live.policy.sliced_prefill import SlicingConfig
from sglang_live.policy.stage import StageConstants
from sglang_live.policy.urgency import UrgencyConfig
from sglang_live.policy.view import FRAME_S
from sglang_live.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig(Settings):
    """`changed` sets single ones: `config.changed({"pacing.min_gap_s": 0.9})`."""

    stage: StageConstants = field(default_factory=StageConstants)
    urgency: UrgencyConfig = field(default_factory=UrgencyConfig)
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    pacing: PacingConfig = field(default_factory=PacingConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    slicing: SlicingConfig = field(default_factory=SlicingConfig)
    best_effort: BestEffortConfig = field(default_factory=BestEffortConfig)
    arbiter: ArbiterConfig = field(default_factory=ArbiterConfig)

    def check(self) -> None:
        self.not_above("urgency.p_safe_s", "pacing.max_low_s")
        self.not_above("best_effort.patience_s", "pacing.max_pause_s")


# Both engines can pause a prefill.
TALKER = PolicyConfig(stage=StageConstants(may_pause_prefill=True))
# Between its tokens and the listener is also the talker, which makes a chunk of its own. Text
# tokens are cheap beside frames: three times as much ahead lasts through longer prefills, and where
# sessions fill the pool, text that may never be spoken costs less than KV that is held for longer.
THINKER = TALKER.changed(
    {
        "stage.pipeline_s": TALKER.stage.pipeline_s + TALKER.stage.chunk_steps * FRAME_S,
        "urgency.p_safe_s": TALKER.urgency.p_safe_s + TALKER.stage.chunk_steps * FRAME_S,
        "pacing.gap_s": 3 * TALKER.pacing.gap_s,
        "pacing.runs_ahead_for_kv": True,
    }
)
