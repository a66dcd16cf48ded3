"""Workload W3: the times at which sessions need their KV, on a server without delay.

Lengths of prompts and responses are those of Mooncake's chains; gaps and utterances are from AMI,
or, in the chat regime, gaps from the trace's own pauses. A user speaks, the request runs, the
response plays, and after a gap the user speaks again; after a conversation's last turn a new one
begins. Times are ideal: first audio at the end of the utterance. A live run takes durations, gaps
and lengths from this schedule, and times from its own playback.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from sglang_live.extensions.planner.simulation.load.arrivals import load_response_gaps
from sglang_live.extensions.planner.simulation.workload import RESPONSE_GAPS

WORKLOADS = Path(__file__).parent.parent / "workloads"
# Users start within this time, which is about one turn of the voice regime. Chosen here.
START_SPREAD_S = 15.0
# Codec frames of Qwen3-Omni's talker last 80 ms. 155 words a minute at 1.3 tokens per word are
# 3.4 tokens a second, hence 3.7 frames per token.
CODEC_FRAME_S = 0.08
FRAMES_PER_TOKEN = 3.7
# Four to six frames per token are usual with one voice (stages/talker/response.py), so their
# standard deviation is about a seventh. Half of that variance is given to conversations here.
PACE_SIGMA = 0.1
_PACE_STREAM = 1
# Of all 3,637 pauses between linked turns of the trace; from request to request, so a little long.
CHAT_MEDIAN_S = 126.0
CHAT_SIGMA = 0.97
# Share of the variance that lies between conversations (mooncake_chains): some users are quick.
CHAT_BETWEEN = 0.37


@dataclass(frozen=True, slots=True)
class Turn:
    """new_tokens: tokens of the prompt that are new to the conversation."""

    new_tokens: int
    output_tokens: int


Chain = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A turn with what is drawn for it. gap_s: from the end of its playback to the next speech."""

    turn: Turn
    utterance_s: float
    gap_s: float
    frames_per_token: float


class Gaps(Protocol):
    """Distribution of the silence between the end of playback and the user's next utterance.

    pace: standard normal, drawn once per conversation; above 0 for slow users.
    """

    @property
    def median_s(self) -> float: ...

    def draw(self, rng: np.random.Generator, pace: float) -> float: ...


@dataclass(frozen=True, slots=True)
class VoiceGaps:
    """Positive part of measured floor-transfer offsets; they are not attributed to speakers."""

    gaps_s: np.ndarray

    @property
    def median_s(self) -> float:
        return float(np.median(self.gaps_s))

    def draw(self, rng: np.random.Generator, pace: float) -> float:
        return float(rng.choice(self.gaps_s))


@dataclass(frozen=True, slots=True)
class ChatGaps:
    """Lognormal gaps.

    scale: factor on all gaps; below 1 for runs of minutes instead of hours.
    """

    scale: float = 1.0

    @property
    def median_s(self) -> float:
        return self.scale * CHAT_MEDIAN_S

    def draw(self, rng: np.random.Generator, pace: float) -> float:
        own = math.sqrt(1 - CHAT_BETWEEN) * rng.standard_normal()
        return self.median_s * math.exp(CHAT_SIGMA * (math.sqrt(CHAT_BETWEEN) * pace + own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Parameters of a schedule.

    Attributes:
        sessions: conversations at the same time, one per user.
        conversations: conversations of each user, one after the other.
        divisor: divisor of all lengths of the trace.
        frames_per_token: codec frames per token of a response, the median.
        pace_sigma: standard deviation of its logarithm, between conversations and again between
            the responses of one.
        token_s: decode step of the ideal server; a request runs that long per token.
    """

    sessions: int = 32
    seed: int = 1
    conversations: int = 3
    divisor: float = 8.0
    frames_per_token: float = FRAMES_PER_TOKEN
    pace_sigma: float = PACE_SIGMA
    token_s: float = 0.02

    def __post_init__(self):
        if self.sessions < 1 or self.conversations < 1:
            raise ValueError("there must be at least one session and one conversation")
        if min(self.divisor, self.frames_per_token, self.token_s) <= 0:
            raise ValueError("divisor, frames per token and decode step must be positive")
        if not 0 <= self.pace_sigma < math.inf:
            raise ValueError(f"the spread of paces must not be negative, got {self.pace_sigma}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One turn: the session's KV is needed at request_s, and grows.

    Attributes:
        session, turn: numbers; a session is one conversation.
        speech_s, request_s: start and end of the utterance.
        generated_s: end of the request; until then its KV cannot move.
        playback_end_s: end of the response's playback, which starts at request_s.
        next_gap_s: from playback_end_s until this user speaks again.
        history_tokens: KV of the turns before.
        last: whether the session is closed after this response.
    """

    session: int
    turn: int
    speech_s: float
    request_s: float
    generated_s: float
    playback_end_s: float
    next_gap_s: float
    history_tokens: int
    input_tokens: int
    output_tokens: int
    last: bool

    @property
    def playback_s(self) -> float:
        return self.playback_end_s - self.request_s

    @property
    def kv_tokens(self) -> int:
        """KV of the session after this turn."""
        return self.history_tokens + self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """All accesses, by request_s."""

    accesses: tuple[Access, ...]

    def working_set_tokens(self, page_tokens: int = 1) -> int:
        """The most KV that all open sessions hold at one time, in whole pages."""
        changes = []
        for access in self.accesses:
            before = pages(access.history_tokens, page_tokens)
            after = pages(access.kv_tokens, page_tokens)
            changes.append((access.request_s, after - before))
            if access.last:
                changes.append((access.playback_end_s, -after))
        # Room that is freed at a moment can be used at that moment.
        return page_tokens * int(np.cumsum([change for _, change in sorted(changes)]).max())

    def pool_tokens(self, share: float, page_tokens: int = 1) -> int:
        """Whole pages of a pool that holds this share of the working set."""
        n_pages = share * (self.working_set_tokens(page_tokens) // page_tokens)
        return page_tokens * math.floor(n_pages)


def pages(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)


def load_chains(path: Path = WORKLOADS / "mooncake_chains.json") -> list[Chain]:
    chains = json.loads(path.read_text("utf-8"))["chains"]
    return [tuple(Turn(new, n_output) for _, _, n_output, new in chain) for chain in chains]


def load_utterances(path: Path = WORKLOADS / "ami_spurts.json") -> np.ndarray:
    """Durations of utterances in seconds. Many are short and hide little loading time."""
    return np.asarray(json.loads(path.read_text("utf-8"))["spurt_s"], dtype=float)


def gaps_of(regime: str, chat_scale: float = 1.0) -> Gaps:
    if regime == "voice":
        return VoiceGaps(load_response_gaps(RESPONSE_GAPS))
    if regime == "chat":
        return ChatGaps(chat_scale)
    raise ValueError(f"no regime is called {regime}; there are voice and chat")


def plan(chains: list[Chain], utterances_s: np.ndarray, gaps: Gaps, spec: Spec) -> Schedule:
    """Draw a schedule. Draws depend on seed and user only, not on the number of sessions."""
    accesses: list[Access] = []
    for user in range(spec.sessions):
        rng = np.random.default_rng([spec.seed, user])
        paces = np.random.default_rng([spec.seed, user, _PACE_STREAM])
        speech_s = float(rng.uniform(0.0, START_SPREAD_S)) + gaps.draw(rng, rng.standard_normal())
        for number in range(spec.conversations):
            session = user * spec.conversations + number
            chain = chains[int(rng.integers(len(chains)))]
            pace = rng.standard_normal()
            draws = [(float(rng.choice(utterances_s)), gaps.draw(rng, pace)) for _ in chain]
            own_pace = spec.frames_per_token * math.exp(spec.pace_sigma * paces.standard_normal())
            spread = np.exp(spec.pace_sigma * paces.standard_normal(len(chain)))
            turns = [
                Drawn(turn, *drawn, own_pace * float(factor))
                for turn, drawn, factor in zip(chain, draws, spread, strict=True)
            ]
            accesses += _converse(session, turns, speech_s, spec)
            speech_s = accesses[-1].playback_end_s + accesses[-1].next_gap_s
    return Schedule(tuple(sorted(accesses, key=lambda access: (access.request_s, access.session))))


def _converse(session: int, turns: list[Drawn], speech_s: float, spec: Spec) -> list[Access]:
    accesses: list[Access] = []
    history_tokens = 0
    for number, drawn in enumerate(turns):
        n_input = max(1, round(drawn.turn.new_tokens / spec.divisor))
        n_output = max(1, round(drawn.turn.output_tokens / spec.divisor))
        request_s = speech_s + drawn.utterance_s
        playback_s = n_output * drawn.frames_per_token * CODEC_FRAME_S
        generated_s = request_s + n_output * spec.token_s
        access = Access(
            session=session,
            turn=number,
            speech_s=speech_s,
            request_s=request_s,
            generated_s=generated_s,
            # Playback cannot end before the response is generated.
            playback_end_s=max(request_s + playback_s, generated_s),
            next_gap_s=drawn.gap_s,
            history_tokens=history_tokens,
            input_tokens=n_input,
            output_tokens=n_output,
            last=number == len(turns) - 1,
        )
        accesses.append(access)
        history_tokens = access.kv_tokens
        speech_s = access.playback_end_s + drawn.gap_s
    return accesses
