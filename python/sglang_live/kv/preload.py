"""Whether KV comes back from the host while its caller is still speaking.

In: a view of link and pool at speech start, barge-in or a second look. Out: yes, no, or later.
LiveServe (arXiv 2606.22983) section 5.2. A preload is a favour: whatever is not there in time,
the normal path loads, layer by layer. So in doubt the answer is no.
"""

from dataclasses import dataclass
from typing import Literal

# How much longer somebody speaks, in seconds, whatever was spoken already. Of the 801 stretches of
# speech in meeting ES2014c of the AMI corpus those that lasted 0, 1, 2, 4 and 8 s went on for
# 2.3, 2.4, 2.3, 2.4 and 2.4 s on average: an exponential distribution, which remembers nothing.
REMAINING_SPEECH_S = 2.3

# KV that waits for its caller to finish speaking is protected so long: of those stretches 1.2 %
# last longer, and a cough must not keep it for ever.
PROTECTED_S = 10.0

SkipReason = Literal["nothing", "link_unmeasured", "too_late", "cap", "memory", "queue"]
WaitReason = Literal["cap", "memory", "queue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadConfig:
    """
    safety: the transfer must fit this often into the time until its need. Loads of live work go
        ahead of it on the link, and speech ends sooner than expected more often than not.
    retry_s: between two looks at a preload that waits; some rounds of the engine.
    max_protected_share: of the pool's tokens, for all KV that was preloaded and not used yet.
        Callers speak a third of the time, and what those hold who speak at once is needed within
        seconds anyway; the rest is left for live work to find victims in.
    max_expected_share: so much of it for callers who have not begun to speak. They may stay silent
        for long, and would be in the way of those who have begun.
    """

    safety: float = 1.5
    retry_s: float = 0.05
    max_protected_share: float = 0.4
    max_expected_share: float = 0.2

    def __post_init__(self) -> None:
        if not 1 <= self.safety < float("inf"):
            raise ValueError(f"safety must be at least 1, got {self.safety}")
        for name in ("max_protected_share", "max_expected_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share, got {getattr(self, name)}")
        if not 0 < self.retry_s < float("inf"):
            raise ValueError(f"retry_s must be positive, got {self.retry_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadView:
    """One session's KV on the host, and what stands in its way.

    Attributes:
        needed_at_s: when prefill is expected to begin. Estimated once, at the trigger: otherwise
            a wait would postpone its own end.
        n_tokens, n_bytes: to bring back.
        bytes_per_s: of the link to the device, None before it was measured.
        latency_s: fixed cost of a transfer.
        queued_bytes: already waiting or under way on that link.
        protected_tokens: preloaded for other sessions and not used yet, or still on their way.
        cap_tokens: most of these there may be; a single session may be longer.
        free_tokens: in the pool, beyond what live work keeps in reserve.
        later_tokens: evictable and used later than this, up to n_tokens;
            VictimIndex.later_tokens().
    """

    now_s: float
    needed_at_s: float
    n_tokens: int
    n_bytes: int
    bytes_per_s: float | None
    latency_s: float
    queued_bytes: int
    protected_tokens: int
    cap_tokens: int
    free_tokens: int
    later_tokens: int


@dataclass(frozen=True, slots=True)
class Admit:
    """evict_tokens: to free for it. done_at_s: when it will be there, by the link's measure."""

    evict_tokens: int
    done_at_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again at until_s, which is in time."""

    until_s: float
    reason: WaitReason


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave it to the normal path. A reason of Wait: it could not wait any longer for that."""

    reason: SkipReason


def judge(view: PreloadView, config: PreloadConfig) -> Admit | Wait | Skip:
    if view.n_tokens <= 0 or view.n_bytes <= 0:
        return Skip("nothing")
    if view.bytes_per_s is None:
        # Loads of the normal path measure the link; a preload need not be the first.
        return Skip("link_unmeasured")
    alone_s = view.latency_s + view.n_bytes / view.bytes_per_s
    cost_s = alone_s + view.queued_bytes / view.bytes_per_s
    if view.now_s > view.needed_at_s - config.safety * alone_s:
        return Skip("too_late")
    if view.now_s > view.needed_at_s - config.safety * cost_s:
        # What is queued may be cancelled, or done sooner than is safe to expect.
        return _wait(view, config, alone_s, "queue")
    if view.protected_tokens and view.protected_tokens + view.n_tokens > view.cap_tokens:
        return _wait(view, config, cost_s, "cap")
    evict_tokens = max(0, view.n_tokens - max(0, view.free_tokens))
    if evict_tokens > view.later_tokens:
        return _wait(view, config, cost_s, "memory")
    return Admit(evict_tokens, view.now_s + cost_s)


def _wait(
    view: PreloadView, config: PreloadConfig, cost_s: float, reason: WaitReason
) -> Wait | Skip:
    until_s = view.now_s + config.retry_s
    in_time = until_s <= view.needed_at_s - config.safety * cost_s
    return Wait(until_s, reason) if in_time else Skip(reason)
