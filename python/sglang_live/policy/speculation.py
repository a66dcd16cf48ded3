"""Whether a speculative turn may begin: its work is lost if the user goes on speaking.

It may use time that nothing else needs, and of the work that was useful a share. Work is counted in
steps of engines: one for a turn's prefill, one for each token and each codec frame.
"""

from dataclasses import dataclass
from typing import Literal

from sglang_live.settings import Positive, Settings, Share

Refusal = Literal["", "no_room", "busy", "session_waste", "server_waste"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig(Settings):
    """
    urgent_share: number of urgent turns beside which none begins, as a share of the sessions. With
        more of them a device that is nearly full no longer serves its listeners in time.
    safe_s: a turn is urgent while its listener has less speech than this: less than the talker's
        P_safe without its unfinished chunk, which pacing leaves to each listener.
    waste_share: steps that may be withdrawn, as a share of the useful ones. A user who pauses
        within every turn withdraws about a third of a response each time.
    session_burst, server_burst: steps that may be withdrawn before any were useful: of one session,
        a few turns; of all together.
    """

    urgent_share: Share = 0.4
    safe_s: Positive = 0.25
    waste_share: Share = 0.5
    session_burst: Positive = 100.0
    server_burst: Positive = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationView:
    """
    n_more: sessions that would be admitted now.
    n_sessions: open sessions.
    n_urgent: turns whose listener waits or soon will, and speculative ones.
    session_left, server_left: steps that may be withdrawn (after_turn).
    """

    n_more: int
    n_sessions: int
    n_urgent: int
    session_left: float
    server_left: float


def refusal(view: SpeculationView, config: SpeculationConfig) -> Refusal:
    """Returns the reason why no speculative turn may begin; "" if one may."""
    if view.n_more < 1:
        return "no_room"
    if view.n_urgent > config.urgent_share * view.n_sessions:
        return "busy"
    if view.session_left <= 0:
        return "session_waste"
    return "server_waste" if view.server_left <= 0 else ""


def after_turn(left: float, n_steps: int, *, withdrawn: bool, share: float, burst: float) -> float:
    """Returns the steps that may be withdrawn after a turn.

    With turns one at a time, all withdrawn steps are fewer than burst + share * useful ones + those
    of one turn.
    """
    return left - n_steps if withdrawn else min(burst, left + share * n_steps)
