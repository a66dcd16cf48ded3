"""Workload W3: when conversations need their KV, on a server that answers at once.

Lengths of prompts and replies are those of Mooncake's chains; when people speak comes from AMI,
or, in the chat regime, from the trace's own pauses. A caller speaks, the request runs, the reply
plays, and after a gap the caller speaks again; after a conversation's last turn a new one begins.
Times are ideal: first audio at the end of the speech, no waiting. A live run takes durations,
gaps and lengths from here, and times from its own playback.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmark.load.arrivals import load_reply_gaps

WORKLOADS = Path(__file__).parent.parent / "workloads"
# Chosen here. Callers start within this time, which is about one turn of the voice regime.
START_SPREAD_S = 15.0
# Codec frames of Qwen3-Omni's talker last 80 ms. 155 words a minute at 1.3 tokens per word are
# 3.4 tokens a second, hence 3.7 frames per token.
CODEC_FRAME_S = 0.08
FRAMES_PER_TOKEN = 3.7
# Of all 3,637 pauses between linked turns of the trace; from request to request, so a little long.
CHAT_MEDIAN_S = 126.0
CHAT_SIGMA = 0.97
# Some are always quick: this much of the variance lies between conversations (mooncake_chains).
CHAT_BETWEEN = 0.37


@dataclass(frozen=True, slots=True)
class Turn:
    """new_tokens: of the prompt, what the conversation did not hold before."""

    new_tokens: int
    output_tokens: int


Chain = tuple[Turn, ...]


class Gaps(Protocol):
    """How long callers are silent between the end of playback and their next words.

    pace: standard normal, drawn once per conversation; above 0 this one is slow.
    """

    @property
    def median_s(self) -> float: ...

    def draw(self, rng: np.random.Generator, pace: float) -> float: ...


@dataclass(frozen=True, slots=True)
class VoiceGaps:
    """Positive part of measured floor-transfer offsets; who waited is not in the data."""

    gaps_s: np.ndarray

    @property
    def median_s(self) -> float:
        return float(np.median(self.gaps_s))

    def draw(self, rng: np.random.Generator, pace: float) -> float:
        return float(rng.choice(self.gaps_s))


@dataclass(frozen=True, slots=True)
class ChatGaps:
    """Lognormal. scale: below 1 for runs of minutes instead of hours."""

    scale: float = 1.0

    @property
    def median_s(self) -> float:
        return self.scale * CHAT_MEDIAN_S

    def draw(self, rng: np.random.Generator, pace: float) -> float:
        own = math.sqrt(1 - CHAT_BETWEEN) * rng.standard_normal()
        return self.median_s * math.exp(CHAT_SIGMA * (math.sqrt(CHAT_BETWEEN) * pace + own))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is drawn.

    Attributes:
        sessions: conversations at the same time, one per caller.
        conversations: of each caller, one after the other.
        divisor: of all lengths of the trace.
        frames_per_token: codec frames that the talker makes of one token of a reply.
        token_s: decode step of the ideal server; a request runs that long per token.
    """

    sessions: int = 32
    seed: int = 1
    conversations: int = 3
    divisor: float = 8.0
    frames_per_token: float = FRAMES_PER_TOKEN
    token_s: float = 0.02

    def __post_init__(self):
        if self.sessions < 1 or self.conversations < 1:
            raise ValueError("there must be at least one session and one conversation")
        if min(self.divisor, self.frames_per_token, self.token_s) <= 0:
            raise ValueError("divisor, frames per token and decode step must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One turn: the session's KV is needed at request_s, and grows.

    Attributes:
        session, turn: numbers; a session is one conversation.
        speech_s, request_s: the user's speech begins, ends.
        generated_s: the request is over; until then its KV cannot move.
        playback_end_s: of the reply, which plays from request_s on.
        next_gap_s: from then until this caller speaks again.
        history_tokens: KV of the turns before.
        last: the session is closed when this reply has been played.
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
        """Of the session once this turn is generated."""
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
        # Room that is given back at a moment can be used at that moment.
        return page_tokens * int(np.cumsum([change for _, change in sorted(changes)]).max())

    def pool_tokens(self, share: float, page_tokens: int = 1) -> int:
        """Whole pages of a pool that holds this share of the working set."""
        n_pages = share * (self.working_set_tokens(page_tokens) // page_tokens)
        return page_tokens * math.floor(n_pages)


def pages(n_tokens: int, page_tokens: int) -> int:
    return -(-n_tokens // page_tokens)


def load_chains(path: Path = WORKLOADS / "mooncake_chains.json") -> list[Chain]:
    chains = json.loads(path.read_text())["chains"]
    return [tuple(Turn(new, n_output) for _, _, n_output, new in chain) for chain in chains]


def load_utterances(path: Path = WORKLOADS / "ami_spurts.json") -> np.ndarray:
    """Durations of users' speech in seconds. Many are short, which leaves little to hide in."""
    return np.asarray(json.loads(path.read_text())["spurt_s"], dtype=float)


def gaps_of(regime: str, chat_scale: float = 1.0) -> Gaps:
    if regime == "voice":
        return VoiceGaps(load_reply_gaps(WORKLOADS / "ami_fto.json"))
    if regime == "chat":
        return ChatGaps(chat_scale)
    raise ValueError(f"no regime is called {regime}; there are voice and chat")


def plan(chains: list[Chain], utterances_s: np.ndarray, gaps: Gaps, spec: Spec) -> Schedule:
    """Draws depend on seed and caller alone: with more sessions the others stay as they are."""
    accesses: list[Access] = []
    for user in range(spec.sessions):
        rng = np.random.default_rng([spec.seed, user])
        speech_s = float(rng.uniform(0.0, START_SPREAD_S)) + gaps.draw(rng, rng.standard_normal())
        for number in range(spec.conversations):
            session = user * spec.conversations + number
            chain = chains[int(rng.integers(len(chains)))]
            pace = rng.standard_normal()
            draws = [(float(rng.choice(utterances_s)), gaps.draw(rng, pace)) for _ in chain]
            accesses += _converse(session, chain, speech_s, draws, spec)
            speech_s = accesses[-1].playback_end_s + accesses[-1].next_gap_s
    return Schedule(tuple(sorted(accesses, key=lambda access: (access.request_s, access.session))))


def _converse(
    session: int,
    chain: Chain,
    speech_s: float,
    draws: Iterable[tuple[float, float]],
    spec: Spec,
) -> list[Access]:
    accesses: list[Access] = []
    history_tokens = 0
    for number, (turn, (utterance_s, gap_s)) in enumerate(zip(chain, draws, strict=True)):
        n_input = max(1, round(turn.new_tokens / spec.divisor))
        n_output = max(1, round(turn.output_tokens / spec.divisor))
        request_s = speech_s + utterance_s
        playback_s = n_output * spec.frames_per_token * CODEC_FRAME_S
        generated_s = request_s + n_output * spec.token_s
        access = Access(
            session=session,
            turn=number,
            speech_s=speech_s,
            request_s=request_s,
            generated_s=generated_s,
            # Nobody hears a reply end before it has been generated.
            playback_end_s=max(request_s + playback_s, generated_s),
            next_gap_s=gap_s,
            history_tokens=history_tokens,
            input_tokens=n_input,
            output_tokens=n_output,
            last=number == len(chain) - 1,
        )
        accesses.append(access)
        history_tokens = access.kv_tokens
        speech_s = access.playback_end_s + gap_s
    return accesses
