"""What a policy reads, and what it decides.

A stage is an engine. A stream is a request in it: running, paused, or waiting for its first step.
The engine fills a StageView once a round from facts that are equal on every rank (the time is one
of them), so all ranks make the same decision. Arrays keep the cost of a round nearly flat in the
number of streams.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_live.policy.round_cost import UNMEASURED, RoundCost

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Classes = npt.NDArray[np.int8]

# Seconds of speech per decode step: the talker makes one codec frame per step, and takes one text
# token of the thinker for it.
FRAME_S = 0.08
# Lateness of a stage before it is measured.
UNMEASURED_LATE_S = 0.1
# Urgency classes, LiveServe (arXiv 2606.22983) section 4.1.
U0, U1, U2 = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """Rates of one engine, measured over its latest rounds.

    round_s: duration of a decode round.
    prefill_s_per_token, prefill_s_fixed, encoder_s_per_audio_s: cost of a prefill round.
    round_s_per_stream: how much longer a decode round is with one more stream; nan: not known yet.
    busy: share of the time in which the engine computes, 0 to 1.
    """

    round_s: float = 0.02
    prefill_s_per_token: float = 1e-4
    prefill_s_fixed: float = 0.01
    encoder_s_per_audio_s: float = 0.005
    round_s_per_stream: float = float("nan")
    busy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BestEffort:
    """The best-effort streams among those of a StageView; arrays are [n], indexed as there.

    Attributes:
        which: bool, is a best-effort stream. None of them is managed.
        half: bool, is one whose prompt is half-prefilled, and that can return to the queue.
        deadline_s: time at which its batch expires, on any clock; inf: never.
        group: int64, equal for streams whose prompts begin alike; by the arrival of the first one.
        others_prefill: another stream, or one that cannot return to the queue, is half-prefilled.
        free_tokens: KV tokens that a prefill could take without evicting an idle session.
        pool_tokens: all KV tokens, at least 1.
        last_prefill_s: launch of the latest prefill with best effort in it.
        cap: Round.cap of the round before.
    """

    which: Bools
    half: Bools
    deadline_s: Floats
    group: Ints
    others_prefill: bool = False
    free_tokens: int = 1 << 30
    pool_tokens: int = 1 << 30
    last_prefill_s: float = float("-inf")
    cap: int = 128
    cost: RoundCost = UNMEASURED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageView:
    """One round of one stage; arrays are [n], equally indexed, and must not be written.

    An index may be free: then it is neither waiting nor managed, has no KV, has started, and has
    an infinite buffer.

    Attributes:
        now_s: time of the round, on the clock of rank 0.
        occupancy: KV tokens in use over all KV tokens, 0 to 1.
        kv_wanted: KV of a user who speaks waits for room, so as to be loaded ahead.
        free_tokens: KV tokens that a prefill could take now.
        prefill_running: a chunked prefill is half done; see StageConstants.may_pause_prefill.
        waiting: bool, in the queue, without KV of its own yet.
        paused: bool, out of the batch by a decision of an earlier round; its KV is kept.
        since_s: time of the latest change between waiting, paused and running.
        arrived_s: time at which it came to this stage.
        buffered_s: the stage-aware playback buffer P: seconds of speech that this stage is ahead
            of its consumer; nan: not known.
        started: bool, the consumer has begun: its buffer can run out.
        kv_tokens: int64, KV tokens it holds.
        prefill_tokens: int64, tokens to compute before its first step; 0 unless waiting.
        managed: bool, belongs to a response that is heard, or leads to one. Others (SGLang's own
            API, text responses) have no listener: they are never paused, and wait behind U1.
        free_rows: request rows that are free. Paused streams keep their rows.
        audio_s: seconds of audio that the encoder hears in its first step; None: no audio waits.
        background: bool, work ahead of its need: it is served when no stream is in need, and not
            later than AdmissionConfig.max_wait_s; None: no stream is background work.
        blocked: bool, cannot step in this round in any case: its input does not exist yet, or its
            last step is in flight; None: no stream is blocked.
        last_prefill_s: end of the latest prefill round; now_s while it is computed.
        decoded_since_prefill: a decode round was launched after the latest prefill.
        best_effort: None: no stream is best-effort work, or no policy tells it from other work.
        late_s: how late a stream's next step may be: what one round in a hundred exceeds.
    """

    now_s: float
    occupancy: float
    free_tokens: int
    prefill_running: bool
    rates: StageRates
    waiting: Bools
    paused: Bools
    since_s: Floats
    arrived_s: Floats
    buffered_s: Floats
    started: Bools
    kv_tokens: Ints
    prefill_tokens: Ints
    managed: Bools
    kv_wanted: bool = False
    free_rows: int = 1 << 30
    audio_s: Floats | None = None
    background: Bools | None = None
    blocked: Bools | None = None
    last_prefill_s: float = float("-inf")
    decoded_since_prefill: bool = True
    best_effort: BestEffort | None = None
    late_s: float = UNMEASURED_LATE_S

    def __len__(self) -> int:
        return len(self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """What one round does.

    Attributes:
        pause: bool [n], streams with KV that do not decode in this round.
        admit: int64, indices of waiting streams, in the order in which they are tried. The other
            waiting streams stay in the queue.
        prefill_budget: tokens that prefill may compute in this round; 0: no prefill (while
            prefill_running only with StageConstants.may_pause_prefill); None: the engine's own
            chunk.
        urgency: int8 [n], U0, U1 or U2; -1 where telemetry is missing.
        urgent: a stream of U0 or U1 can step in this round, or begin.
        until_gap_s: time after which the first listener would hear a gap if this stage computed
            nothing; inf: there is none.
        n_unknown: managed streams without telemetry, which are served in stock order and never
            paused.
        requeue: bool [n], half-prefilled streams that return to the queue before this round's
            prefill; None: none.
        cap: BROS's cap on best-effort streams in the next round's batch; 0: the first one.
        next_change_s: time at which the first paused stream could resume if the consumers play
            one second per second; inf: no stream is paused. Between rounds without a step the
            engine may sleep until then, or until an event.
    """

    pause: Bools
    admit: Ints
    prefill_budget: int | None
    urgency: Classes
    urgent: bool = False
    until_gap_s: float = float("inf")
    n_unknown: int = 0
    requeue: Bools | None = None
    cap: int = 0
    next_change_s: float = field(default=float("inf"))
