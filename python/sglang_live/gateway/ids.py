"""Ids of protocol objects."""

from secrets import token_hex

# OpenAI's ids are at most 32 characters; some clients keep them in fields of that width.
_RANDOM_BYTES = 10


def new_id(prefix: str) -> str:
    """prefix: "event", "item", "resp", "sess", "conv" or "key"."""
    return f"{prefix}_{token_hex(_RANDOM_BYTES)}"
