"""Startup delay: how long the first sound of a response waits, so that no gap follows.

The first chunk is small and could leave at once; on a busy server the next one may take longer than
the first one plays. How late the chunks of the latest responses came is the estimate for the next
one. Load comes in bursts of a few seconds, so responses count while they still play.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_live.settings import Count, NonNegative, Positive, Settings, Share, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupDelayConfig(Settings):
    """
    gap_s: a gap costs its listener as much as waiting for this time.
    bridged_s: longest gap that a player's jitter buffer hides, and that needs no delay.
    max_s: longest delay of a first sound that exists.
    beyond_share: share of responses that no delay keeps free of gaps, from which there is none:
        the server is too slow, and a delay only adds to it.
    safe_s: with this much audio ahead of playback the beginning is over.
    n_responses, max_age_s: number and age of the past responses that count.
    settled_s: a response that is not complete counts from this age on: its first chunks have come.
    company_range, similar_share: two responses are similar if the numbers of others in progress
        differ by at most this number, or this share of them.
    """

    gap_s: Positive = 4.0
    bridged_s: NonNegative = 0.08
    max_s: NonNegative = 0.2
    beyond_share: Share = 0.1
    safe_s: Positive = 0.4
    n_responses: Count = 8
    max_age_s: Positive = 60.0
    settled_s: NonNegative = 0.5
    company_range: Whole = 1
    similar_share: NonNegative = 0.5


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a response began.

    began_s: time of its first audio.
    company: other responses in progress at that time.
    late_s: its lateness so far.
    ended: it is complete.
    """

    began_s: float
    company: int
    late_s: float
    ended: bool = True


def lateness_s(arrivals: Sequence[tuple[float, float]]) -> float:
    """Returns the delay that would have kept a response free of gaps, VoxServe eq. 2.

    Args:
        arrivals: (time, duration) of its chunks in seconds, in order.
    """
    latest_s, audio_s = 0.0, 0.0
    for at_s, duration_s in arrivals:
        if audio_s:
            latest_s = max(latest_s, at_s - arrivals[0][0] - audio_s)
        audio_s += duration_s
    return latest_s


def startup_delay_s(
    beginnings: Sequence[Beginning], company: int, now_s: float, config: StartupDelayConfig
) -> float:
    """Returns the delay of a response whose audio begins now; 0 if no earlier one counts.

    Args:
        beginnings: of earlier responses, in any order.
        company: other responses in progress now.
    """
    counts = [
        one
        for one in beginnings
        if now_s - one.began_s <= config.max_age_s
        and (one.ended or now_s - one.began_s >= config.settled_s)
    ]
    if not counts:
        return 0.0
    nearest = min(abs(one.company - company) for one in counts)
    alike = max(nearest, config.company_range, config.similar_share * company)
    similar = [one for one in counts if abs(one.company - company) <= alike]
    similar.sort(key=lambda one: one.began_s)
    latest = similar[-config.n_responses :]
    needed = [max(one.late_s - config.bridged_s, 0.0) for one in latest]
    if sum(one_s > config.max_s for one_s in needed) > config.beyond_share * len(needed):
        return 0.0

    def cost_s(delay_s: float) -> float:
        n_gaps = sum(one_s > delay_s for one_s in needed)
        return delay_s + config.gap_s * n_gaps / len(needed)

    return min([0.0, *(one_s for one_s in needed if one_s <= config.max_s)], key=cost_s)
