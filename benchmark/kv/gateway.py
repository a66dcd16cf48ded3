"""Eviction by what a server knows: its own estimate, and the best one.

`GatewayNextUse` is the server's: kv/next_use.py, fed as the gateway feeds it. `Informed` is the
reference for it: at each moment it has the same facts (who has begun to speak, how far playback
is, how much text is complete, how fast a session was spoken), and besides the true distributions
of gaps, utterances, paces and lengths of conversations. From these it draws what may follow.
`Belady` has besides what cannot be known: when each user will speak, for how long, and which
response is the last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmark.kv.judges import IdleFacts, Policy
from benchmark.kv.workload import CODEC_FRAME_S, Chain, Gaps, Spec
from sglang_live.interaction.user_stats import UserPrior, UserStats
from sglang_live.kv.next_use import NextUse

# More draws change the number of misses by less than seeds do.
_DRAWS = 64
# A request takes room for about as long, however soon it comes.
_TURN_S = 1.0
# Gaps are drawn as often for their distribution.
_GAP_DRAWS = 4096


class GatewayNextUse(Policy):
    """Evicts the session whose next use is expected farthest from now, by the server's estimate."""

    def __init__(self) -> None:
        self._prior, self._next_use = UserPrior(), NextUse()
        self._users: dict[int, UserStats] = {}
        self._n_tokens: dict[int, int] = {}
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._idle_s: dict[int, float] = {}
        self._speaking: set[int] = set()

    def speaks(self, session: int, now_s: float) -> None:
        self._speaking.add(session)
        user, ended_s = self._user(session), self._ended_s.pop(session, None)
        if ended_s is not None:
            user.add_gap(now_s - ended_s)
            self._next_use.observe_gap(now_s - ended_s)
            self._next_use.set_user_gap(session, user.response_gap_s)

    def accessed(self, session: int, now_s: float) -> None:
        self._speaking.discard(session)

    def idle(self, session: int, now_s: float, facts: IdleFacts) -> None:
        self._idle_s[session] = now_s
        self._began_s[session], self._n_tokens[session] = facts.began_s, facts.output_tokens
        whole_s = facts.output_tokens * self._user(session).frames_per_token * CODEC_FRAME_S
        self._next_use.plays_until(session, max(now_s, facts.began_s + whole_s))

    def spoken(self, session: int, now_s: float, playback_end_s: float) -> None:
        n_frames = round((playback_end_s - self._began_s[session]) / CODEC_FRAME_S)
        self._user(session).add_pace(n_tokens=self._n_tokens[session], n_frames=n_frames)
        self._ended_s[session] = playback_end_s
        self._next_use.plays_until(session, playback_end_s)

    def closed(self, session: int) -> None:
        self._next_use.forget(session)

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        def rank(session: int) -> tuple[bool, float]:
            expected_s = self._next_use.expected(session)
            assert expected_s is not None  # every candidate was idle()
            return session not in self._speaking, abs(expected_s - now_s)

        return max(candidates, key=rank)

    def _user(self, session: int) -> UserStats:
        return self._users.setdefault(session, UserStats(self._prior))


@dataclass(slots=True, kw_only=True)
class Distributions:
    """What a schedule is drawn from.

    Attributes:
        utterances_s, gaps_s: ascending.
        last: by number of the turn, the probability that it is the last of its conversation.
        log_pace: of the median of frames per token; pace_sigma as in workload.Spec.
    """

    utterances_s: np.ndarray
    gaps_s: np.ndarray
    last: list[float]
    log_pace: float
    pace_sigma: float

    @staticmethod
    def of(
        chains: list[Chain], utterances_s: np.ndarray, gaps: Gaps, spec: Spec
    ) -> "Distributions":
        rng = np.random.default_rng(0)
        gaps_s = [gaps.draw(rng, rng.standard_normal()) for _ in range(_GAP_DRAWS)]
        lengths = np.array([len(chain) for chain in chains])
        last = [
            float((lengths == n).sum() / (lengths >= n).sum()) for n in range(1, lengths.max() + 1)
        ]
        return Distributions(
            utterances_s=np.sort(utterances_s),
            gaps_s=np.sort(gaps_s),
            last=last,
            log_pace=math.log(spec.frames_per_token),
            pace_sigma=spec.pace_sigma,
        )


@dataclass(slots=True)
class _Known:
    """One session, as far as it is known.

    log_paces: of its responses that were spoken to their end.
    ended_s: end of playback; None before the talker has ended the response.
    speech_s: since when its user speaks; None: silent.
    """

    turn: int = -1
    began_s: float = 0.0
    n_tokens: int = 0
    ended_s: float | None = None
    speech_s: float | None = None
    log_paces: list[float] = field(default_factory=list)


class Informed(Policy):
    """Evicts the session whose KV is expected to save the fewest reloads per second of its stay.

    KV that is needed in t seconds saves one reload for t seconds of room. The optimum itself cannot
    be computed. Of rules over the same draws (mean, median and lower quartile of t, and how often
    a session is needed last of all), this one has the fewest misses over the judge's points.
    """

    def __init__(self, world: Distributions, seed: int = 0):
        self._world, self._rng = world, np.random.default_rng(seed)
        self._known: dict[int, _Known] = {}

    def speaks(self, session: int, now_s: float) -> None:
        self._known[session].speech_s = now_s

    def accessed(self, session: int, now_s: float) -> None:
        known = self._known.setdefault(session, _Known())
        known.turn, known.speech_s, known.ended_s = known.turn + 1, None, None

    def idle(self, session: int, now_s: float, facts: IdleFacts) -> None:
        known = self._known[session]
        known.began_s, known.n_tokens = facts.began_s, facts.output_tokens

    def spoken(self, session: int, now_s: float, playback_end_s: float) -> None:
        known = self._known[session]
        known.ended_s = playback_end_s
        frames = (playback_end_s - known.began_s) / CODEC_FRAME_S
        known.log_paces.append(math.log(frames / known.n_tokens))

    def closed(self, session: int) -> None:
        del self._known[session]

    def victim(self, candidates: Sequence[int], now_s: float) -> int:
        needed_s = np.array([self._draw(self._known[s], now_s) for s in candidates])
        saved_per_s = (1.0 / (needed_s + _TURN_S)).mean(axis=1)
        return candidates[int(saved_per_s.argmin())]

    def _draw(self, known: _Known, now_s: float) -> np.ndarray:
        """Seconds until the session's next request, [_DRAWS]; infinite if there is none."""
        world = self._world
        if known.speech_s is not None:
            return self._remaining(world.utterances_s, now_s - known.speech_s)
        utterance_s = self._remaining(world.utterances_s, 0.0)
        if known.ended_s is not None and known.ended_s <= now_s:
            # Its session is open, so the response was not the last.
            return self._remaining(world.gaps_s, now_s - known.ended_s) + utterance_s
        needed_s = self._to_play(known, now_s) + self._remaining(world.gaps_s, 0.0) + utterance_s
        ends = self._rng.random(_DRAWS) < world.last[min(known.turn, len(world.last) - 1)]
        return np.where(ends, np.inf, needed_s)

    def _to_play(self, known: _Known, now_s: float) -> np.ndarray:
        if known.ended_s is not None:
            return np.full(_DRAWS, known.ended_s - now_s)
        world, n = self._world, len(known.log_paces)
        # Between conversations and within one the variance is the same: a normal posterior.
        mean = (world.log_pace + sum(known.log_paces)) / (n + 1)
        sigma = world.pace_sigma * math.sqrt(1 + 1 / (n + 1))
        pace = np.exp(mean + sigma * self._rng.standard_normal(_DRAWS))
        end_s = known.began_s + known.n_tokens * pace * CODEC_FRAME_S
        return np.maximum(end_s - now_s, 0.0)

    def _remaining(self, durations_s: np.ndarray, elapsed_s: float) -> np.ndarray:
        """What is left of a duration that has lasted for elapsed_s."""
        first = int(np.searchsorted(durations_s, elapsed_s, side="right"))
        if first == len(durations_s):
            return np.full(_DRAWS, elapsed_s)
        return self._rng.choice(durations_s[first:], _DRAWS) - elapsed_s
