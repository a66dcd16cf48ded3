"""How users talk: their clips, the lengths of responses, the gaps and the interruptions.

In: the files in data/, whose sources are in them. Out: the plans of a run's users.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from sglang_live.extensions.planner.simulation.load.arrivals import (
    ResponseLengths,
    UserPlan,
    load_response_gaps,
    plan_users,
)
from sglang_live.extensions.planner.simulation.load.interruptions import (
    InterruptionModel,
    load_response_durations,
)

_DATA = Path(__file__).parent / "data"
CLIPS = _DATA / "clips.json"
RESPONSE_GAPS = _DATA / "ami_fto.json"
RESPONSE_DURATIONS = _DATA / "demo_reply_durations.json"
# Noises of voice_load: not heard here, but every draw of a user is then the same.
_SOUNDS = ("noise", "cough", "music", "back_channel")
# A stream of random numbers of each user, beside those of plan_users.
_PAUSES_STREAM = 3
# Shorter pauses are none to a server, and longer ones end the turn. Between two of them are words.
_PAUSE_S, _PHRASE_S = (0.2, 0.5), 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """
    onset_s, end_s: of its speech. end_known_s: from there to speech_stopped.
    """

    duration_s: float
    onset_s: float
    end_s: float
    end_known_s: float


@dataclass(frozen=True, slots=True)
class History:
    """What a session holds of a conversation.

    n_user: tokens of the user's messages. has_kv: otherwise its first turn computes it all.
    """

    n_tokens: int
    n_user: int
    has_kv: bool = True


NEW = History(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """
    turns: of each user.
    barge_in: share of responses that the user interrupts.
    arrive_s: time in which all users arrive; 0: they begin within a few seconds.
    arrival_shape: of gamma-distributed times between arrivals; 1: Poisson; below 1: bursts.
    second_counts: arrivals in the bursts of this trace instead.
    pauses_per_s: of a user within a second of speech; they end no turn.
    response_durations_s, response_gaps_s: from which those of each turn are drawn.
    """

    clips: Mapping[str, Clip]
    response_durations_s: np.ndarray
    response_gaps_s: np.ndarray
    turns: int
    barge_in: float = 0.0
    seed: int = 1
    arrive_s: float = 0.0
    arrival_shape: float = 1.0
    second_counts: np.ndarray | None = None
    pauses_per_s: float = 0.0

    @classmethod
    def load(
        cls, *, turns: int, barge_in: float, seed: int, durations: Path = RESPONSE_DURATIONS
    ) -> Self:
        """Raises ValueError if `durations` is no file of durations."""
        clips = json.loads(CLIPS.read_text("utf-8"))["clips"]
        return cls(
            clips={name: Clip(**clip) for name, clip in clips.items()},
            response_durations_s=load_response_durations(durations),
            response_gaps_s=load_response_gaps(RESPONSE_GAPS),
            turns=turns,
            barge_in=barge_in,
            seed=seed,
        )

    def with_longer_responses(self, factor: float) -> Self:
        """Responses of another length, which are interrupted as much later."""
        return replace(self, response_durations_s=factor * self.response_durations_s)

    def plans(self, n_users: int, repeat: int) -> list[UserPlan]:
        plans = plan_users(
            n_users=n_users,
            n_turns=self.turns,
            clips=sorted(self.clips),
            response_gaps_s=self.response_gaps_s,
            seed=self.seed,
            repeat=repeat,
            open_loop_rps=n_users / self.arrive_s if self.arrive_s else None,
            arrival_shape=self.arrival_shape,
            second_counts=self.second_counts,
            interruptions=InterruptionModel(
                barge_in=self.barge_in,
                false_triggers=0.0,
                response_durations_s=self.response_durations_s,
                sounds=_SOUNDS,
            ),
            response_lengths=ResponseLengths(self.response_durations_s),
        )
        return [self._with_pauses(plan, repeat) for plan in plans] if self.pauses_per_s else plans

    def _with_pauses(self, plan: UserPlan, repeat: int) -> UserPlan:
        rng = np.random.default_rng([self.seed, repeat, plan.user, _PAUSES_STREAM])
        turns = (
            replace(turn, pauses_s=self._pauses_s(self.clips[turn.clip], rng))
            for turn in plan.turns
        )
        return replace(plan, turns=tuple(turns))

    def _pauses_s(self, clip: Clip, rng: np.random.Generator) -> tuple[tuple[float, float], ...]:
        speech_s = clip.end_s - clip.onset_s
        begins = np.sort(rng.uniform(0.0, speech_s, rng.poisson(self.pauses_per_s * speech_s)))
        found: list[tuple[float, float]] = []
        said_s = 0.0
        for begin_s, length_s in zip(begins, rng.uniform(*_PAUSE_S, len(begins)), strict=True):
            if begin_s - said_s >= _PHRASE_S and speech_s - begin_s - length_s >= _PHRASE_S:
                found.append((float(begin_s), float(length_s)))
                said_s = begin_s + length_s
        return tuple(found)
