"""Tokens of requests of batches, in the form of OpenAI's batch object.

In: bodies of responses, whose `usage` has one of two forms. Out: Tokens, summed.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tokens:
    """n_cached: those of the input whose KV was there."""

    n_in: int = 0
    n_cached: int = 0
    n_out: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(
            self.n_in + other.n_in, self.n_cached + other.n_cached, self.n_out + other.n_out
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "input_tokens": self.n_in,
            "input_tokens_details": {"cached_tokens": self.n_cached},
            "output_tokens": self.n_out,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.n_in + self.n_out,
        }


NO_TOKENS = Tokens()


def tokens_of(body: Any) -> Tokens:
    """Of a response: chats and completions count prompt_tokens, others input_tokens."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return NO_TOKENS
    details = usage.get("prompt_tokens_details")
    n_cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    n_in = usage.get("prompt_tokens", usage.get("input_tokens"))
    n_out = usage.get("completion_tokens", usage.get("output_tokens"))
    return Tokens(n_in or 0, n_cached or 0, n_out or 0)
