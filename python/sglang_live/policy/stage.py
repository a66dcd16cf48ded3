"""What is true of a stage, whatever the rules: its steps, and the way from them to the listener."""

from dataclasses import dataclass

from sglang_live.policy.view import FRAME_S
from sglang_live.settings import Count, NonNegative, Positive, Settings, Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConstants(Settings):
    """The longer the way from a stage to the listener, the larger its pipeline_s.

    step_s: speech of one decode step; of a talker, as its model says (TalkerModel).
    chunk_steps: steps of which the next stage makes one chunk of audio; as step_s.
    pipeline_s: from a full chunk to its sound: vocoder, network, jitter buffer of the player.
    chunk_tokens: the engine's own prefill chunk; a larger budget has no effect.
    min_chunk_tokens: below it the fixed cost of a prefill round outweighs its work.
    may_pause_prefill: the engine can run decodes between two chunks of a prompt, as SGLang does by
        its prefill_decode_interval. Otherwise slices only add cost.
    """

    step_s: Positive = FRAME_S
    chunk_steps: Count = 4
    pipeline_s: NonNegative = 0.25
    chunk_tokens: Count = 2048
    min_chunk_tokens: Count = 64
    may_pause_prefill: Switch = False

    def check(self) -> None:
        self.not_above("min_chunk_tokens", "chunk_tokens")

    @property
    def chunk_s(self) -> float:
        """Speech of one chunk of audio."""
        return self.chunk_steps * self.step_s

    def latency_s(self, round_s: float) -> float:
        """Returns the speech that a stream must have buffered at its next decode step.

        Until its next sound, either a whole chunk has to be made, or one step is missing of a chunk
        of which nothing is audio yet.
        """
        missing_s = (self.chunk_steps - 1) * self.step_s + round_s
        return self.pipeline_s + max(self.chunk_steps * round_s, missing_s)

    def in_time_s(self, round_s: float, late_s: float, headroom: float = 1.0) -> float:
        """Returns latency_s and the lateness of a resumed stream, which waits for the round in
        flight as well.

        late_s: StageView.late_s.
        headroom: share of a round's speech by which a stream catches up after a delay.
        """
        return self.latency_s(round_s) + (late_s + round_s) / headroom
