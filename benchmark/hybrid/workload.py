"""What the requests of the comparison are like: listeners' turns, and best-effort work.

In: lengths of real services, a rate, a seed. Out: turns with their times, and a supply of work.
Lengths are divided: constants are chosen on `tune`, results are of `held_out`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np

from benchmark.simulate.traffic import Traffic

WORKLOADS = Path(__file__).parent.parent / "workloads"
# `voice`: the KV of the conversation is kept, and the user has spoken; `chat`: all of it is new.
KINDS = ("voice", "chat")
SERVICES = ("code", "conversation")
_AUDIO_TOKENS_PER_S = 13
PARTS = ("tune", "held_out")
Part = Literal["tune", "held_out"]


@dataclass(frozen=True, slots=True)
class Work:
    """
    arrives_s: 0 for best-effort work, of which there is always more.
    cached_tokens: those of the prompt whose KV a session has kept.
    audio_s: speech in the other tokens of the prompt.
    """

    arrives_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    audio_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """
    kind: one of KINDS.
    heard: [n, 2], tokens of the prompt and of the response of requests that a user listens to.
    best_effort: the same of others.
    spurts_s: durations of what users say.
    """

    kind: str

    heard: np.ndarray
    best_effort: np.ndarray
    spurts_s: np.ndarray
    traffic: Traffic

    @classmethod
    def load(cls, part: Part, kind: str, best_effort: str = "code") -> Self:
        """best_effort: one of SERVICES, whose lengths best-effort requests have."""
        found, at = (
            json.loads((WORKLOADS / "azure_lengths.json").read_text("utf-8")),
            PARTS.index(part),
        )
        spurts = json.loads((WORKLOADS / "ami_spurts.json").read_text("utf-8"))["spurt_s"]
        heard, others = (np.array(found[name])[at::2] for name in ("conversation", best_effort))
        return cls(kind, heard, others, np.array(spurts)[at::2], Traffic.load())

    def turns(self, per_s: float, duration_s: float, seed: int) -> list[Work]:
        """Turns in the bursts of a real service, per_s of them on average."""
        if not per_s:
            return []
        times = self.traffic.bursts_s(per_s, duration_s, seed)
        rng = np.random.default_rng([seed, 1])
        lengths = self.heard[rng.integers(0, len(self.heard), len(times))]
        said_s = self.spurts_s[rng.integers(0, len(self.spurts_s), len(times))]
        return [
            self._turn(float(at_s), int(n_in), int(n_out), float(audio_s))
            for at_s, (n_in, n_out), audio_s in zip(times, lengths, said_s, strict=True)
        ]

    def _turn(self, at_s: float, n_in: int, n_out: int, audio_s: float) -> Work:
        if self.kind == "chat":
            return Work(at_s, n_in, n_out)
        n_new = 8 + int(audio_s * _AUDIO_TOKENS_PER_S)  # with the markup of a message
        return Work(at_s, n_in + n_new, n_out, n_in, audio_s)

    def supply(self, seed: int) -> Iterator[Work]:
        """Best-effort work without end."""
        rng = np.random.default_rng([seed, 2])
        while True:
            n_in, n_out = self.best_effort[rng.integers(len(self.best_effort))]
            yield Work(0.0, int(n_in), int(n_out))
