"""Whether a session's KV is loaded from the host while its user is still speaking, and how much.

In: a view of link and pool at speech start, barge-in, or after a wait. Out: admit, skip or wait.
LiveServe (arXiv 2606.22983) section 5.2. KV that was not preloaded in time is loaded by the normal
path, layer by layer. So a doubtful preload is skipped.
"""

from dataclasses import dataclass
from typing import Literal

# Expected remaining duration of speech, which does not depend on its duration so far: of the 801
# stretches of speech in meeting ES2014c of the AMI corpus those that had lasted for 0, 1, 2, 4 and
# 8 s lasted for another 2.3, 2.4, 2.3, 2.4 and 2.4 s on average: an exponential distribution.
REMAINING_SPEECH_S = 2.3

# Protection of KV whose user is speaking: 1.2 % of those stretches last longer, and the KV of a
# user who only coughed must be released.
PROTECTED_S = 10.0

# Share of the pool that stays free for the steps of running requests between two reviews.
RESERVE_SHARE = 0.05

WaitReason = Literal["cap", "memory", "queue", "rows"]
SkipReason = Literal["nothing", "link_unmeasured", "too_late", "cap", "memory", "queue", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadConfig:
    """
    safety: multiple of the transfer's duration that must be left until its need. Loads of live
        work go ahead of it on the link, and speech mostly ends sooner than the mean.
    in_flight_s: time that the link needs for all transfers in flight, beyond which no preload is
        added: a load that a prefill waits for comes behind them. A longer round counts instead,
        because nothing can be added before it ends.
    retry_s: time between two judgements of a preload that waits; some rounds of the engine.
    max_protected_share: share of the pool's tokens for all KV that is preloaded and not used yet.
        It is needed within seconds, before any other idle KV. The first victims of live work come
        from the rest.
    max_expected_share: the same for users who have not begun to speak. They may be silent for
        long, and take room from users who have begun.
    """

    safety: float = 1.5
    in_flight_s: float = 0.01
    retry_s: float = 0.05
    max_protected_share: float = 0.9
    max_expected_share: float = 0.2

    def __post_init__(self) -> None:
        if not 1 <= self.safety < float("inf"):
            raise ValueError(f"safety must be at least 1, got {self.safety}")
        for name in ("max_protected_share", "max_expected_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, got {getattr(self, name)}")
        for name in ("retry_s", "in_flight_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadView:
    """One session's KV on the host, and the state of link and pool.

    Attributes:
        needed_at_s: expected begin of the prefill. While the user speaks REMAINING_SPEECH_S from
            now, so that a wait ends with the speech; otherwise estimated once, at the trigger,
            because a wait would postpone its own end.
        n_tokens, n_bytes: size of the KV to load.
        bytes_per_s: bandwidth of the link to the device; None: not measured yet.
        latency_s: fixed cost of a transfer.
        queued_bytes: bytes that are in transfer on that link, and of preloads that have begun.
        others_tokens: tokens preloaded for other sessions and not used yet, or in transfer.
        own_tokens: the same of this session, of which a part may have been loaded before.
        cap_tokens: maximum of both; a single session may have more.
        free_tokens: free tokens of the pool, without the reserve of live work.
        later_tokens: evictable tokens of KV that is used later than this, up to n_tokens;
            VictimIndex.later_tokens().
        has_row: whether a row of the pool's table is left for the session.
    """

    now_s: float
    needed_at_s: float
    n_tokens: int
    n_bytes: int
    bytes_per_s: float | None
    latency_s: float
    queued_bytes: int
    others_tokens: int
    own_tokens: int
    cap_tokens: int
    free_tokens: int
    later_tokens: int
    has_row: bool = True


@dataclass(frozen=True, slots=True)
class Admit:
    """The preload begins.

    n_tokens: the first tokens, for which there is room now. Those behind them are judged again
        when these are loaded: what arrives in time shortens the load of the request.
    limited_by: why these are not all; empty if they are.
    """

    n_tokens: int
    limited_by: Literal["", "cap", "memory"] = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """The preload is judged again at until_s, when it could still be in time."""

    until_s: float
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Skip:
    """The normal path loads the KV. With a reason of Wait there is no time left to wait."""

    reason: SkipReason


def judge(view: PreloadView, config: PreloadConfig) -> Admit | Wait | Skip:
    """Returns whether the preload begins now, is judged again later, or is skipped."""
    if view.n_tokens <= 0 or view.n_bytes <= 0:
        return Skip("nothing")
    if view.bytes_per_s is None:
        # Loads of the normal path measure the link, so no preload has to be the first.
        return Skip("link_unmeasured")
    alone_s = view.latency_s + view.n_bytes / view.bytes_per_s
    cost_s = alone_s + view.queued_bytes / view.bytes_per_s
    if view.now_s > view.needed_at_s - config.safety * alone_s:
        return Skip("too_late")
    if view.now_s > view.needed_at_s - config.safety * cost_s:
        # Queued transfers may be cancelled, or be over sooner than the safety factor assumes.
        return _wait(view, config, alone_s, "queue")
    if not view.has_row:
        return _wait(view, config, cost_s, "rows")
    under_cap = view.n_tokens
    if view.others_tokens:
        under_cap = max(0, view.cap_tokens - view.others_tokens - view.own_tokens)
    in_pool = max(0, view.free_tokens) + view.later_tokens
    n_tokens = min(view.n_tokens, under_cap, in_pool)
    limit: Literal["cap", "memory"] = "cap" if under_cap < in_pool else "memory"
    if n_tokens == 0:
        return _wait(view, config, cost_s, limit)
    return Admit(n_tokens, limit if n_tokens < view.n_tokens else "")


def _wait(
    view: PreloadView, config: PreloadConfig, cost_s: float, reason: WaitReason
) -> Wait | Skip:
    until_s = view.now_s + config.retry_s
    in_time = until_s <= view.needed_at_s - config.safety * cost_s
    return Wait(until_s, reason) if in_time else Skip(reason)
