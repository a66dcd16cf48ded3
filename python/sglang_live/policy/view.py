"""What a policy may know, and what it may decide.

A stage is an engine. A stream is a request in it: running, sitting out, or waiting for its first
step. The engine fills a StageView once a round from facts that are equal on every rank (the time
comes with the facts), so every rank decides alike. Arrays keep a round's cost nearly flat in the
number of streams.
"""

from dataclasses import dataclass, field

import numpy as np

# Speech that one decode step is worth, in seconds: the talker makes one codec frame per step, and
# takes one text token of the thinker's for it.
FRAME_S = 0.08
# How often a caller interrupts, of whom nothing is known. Two answers heard to their end halve it.
FIRST_INTERRUPTS = 0.2
# Urgency classes, LiveServe (arXiv 2606.22983) section 4.1.
U0, U1, U2 = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRates:
    """PromptMeasured by the engine, but for prefill_s_fixed: moving averages over its own rounds.

    round_s: one decode round. prefill_s_per_token, prefill_s_fixed: a prefill round's cost.
    round_s_per_stream: how much longer a decode round gets by one more stream. nan: not known.
    busy: share of the time in which the engine computes, 0 to 1.
    """

    round_s: float = 0.02
    prefill_s_per_token: float = 1e-4
    prefill_s_fixed: float = 0.01
    round_s_per_stream: float = float("nan")
    busy: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageView:
    """One round of one stage; arrays are [n], equally indexed, and must not be written.

    An index may be free: neither waiting nor managed, no KV, started, ahead without end.

    Attributes:
        now_s: the round's time, on the clock of rank 0.
        occupancy: KV tokens in use over KV tokens there are, 0 to 1.
        free_tokens: KV tokens that a prefill could take now.
        free_rows: streams that could be admitted now, KV aside. Held streams keep their rows.
        prefill_running: a chunked prefill is half-way; see PolicyConfig.may_pause_prefill.
        last_prefill_s: when the latest prefill round was over.
        waiting: bool, in the queue, without KV of its own yet.
        held: bool, sits out by a decision of an earlier round; its KV is kept.
        since_s: when it was last admitted to waiting, held or running, whichever it is in.
        arrived_s: when it came to this stage.
        buffered_s: the stage-aware playback buffer P: seconds of speech that this stage is ahead of
            its consumer. nan: not known.
        started: bool, the consumer has begun: there is something to run dry.
        kv_tokens: int64, KV tokens it holds.
        prefill_tokens: int64, tokens to compute before its first step; 0 unless waiting.
        interrupts: how often this caller interrupts, 0 to 1.
        managed: bool, one of our replies that are heard, or on the way to one. Others (SGLang's own
            API, replies in writing) have no listener: they are never held, and wait behind U1.
        background: bool, nobody waits for it: it is served when nobody else is in need, and not
            later than PolicyConfig.max_wait_s. None: nobody.
        gated: bool, cannot step in this round whatever is decided: its input does not exist yet,
            or its last step is in flight. None: nobody.
        peer_urgent: somebody is urgent in a stage nearer to the ear on the same device.
    """

    now_s: float
    occupancy: float
    free_tokens: int
    prefill_running: bool
    rates: StageRates
    waiting: np.ndarray
    paused: np.ndarray
    since_s: np.ndarray
    arrived_s: np.ndarray
    buffered_s: np.ndarray
    started: np.ndarray
    kv_tokens: np.ndarray
    prefill_tokens: np.ndarray
    interrupts: np.ndarray
    managed: np.ndarray
    free_rows: int = 1 << 30
    background: np.ndarray | None = None
    blocked: np.ndarray | None = None
    last_prefill_s: float = float("-inf")
    peer_urgent: bool = False

    def __len__(self) -> int:
        return len(self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Round:
    """What one round does.

    Attributes:
        pause: bool [n], streams with KV that do not decode in this round.
        admit: int64, indices of waiting streams in the order they should be tried. Those that are
            left out wait for another round.
        prefill_budget: tokens that prefill may take in this round; None: the engine's own chunk.
            0: no prefill; while prefill_running only by PolicyConfig.may_pause_prefill.
        urgency: int8 [n], U0, U1 or U2; -1 where telemetry is missing.
        urgent: somebody of U0 or U1 can step in this round, or begin.
        n_unknown: managed streams without telemetry, treated in stock order and never held.
        next_change_s: when the first of those who sit out could return by time alone, if the
            consumers take one second per second. Between rounds without a step the engine may
            sleep till then, or till something else happens. inf: nobody sits out.
    """

    pause: np.ndarray
    admit: np.ndarray
    prefill_budget: int | None
    urgency: np.ndarray
    urgent: bool = False
    n_unknown: int = 0
    next_change_s: float = field(default=float("inf"))
