"""Which messages this version has, as a hash: processes with equal ones understand each other."""

import json
from functools import cache
from hashlib import blake2b
from typing import Any

import msgspec

from sglang_live.messages import AnyMessage


@cache
def protocol_hash() -> str:
    """12 hexadecimal digits, of the names and types of all messages and of their fields."""
    schemas, parts = msgspec.json.schema_components([AnyMessage])
    text = json.dumps(_types_alone([schemas, parts]), sort_keys=True)
    return blake2b(text.encode(), digest_size=6).hexdigest()


def _types_alone(schema: Any) -> Any:
    """Without what the docstrings say."""
    if isinstance(schema, dict):
        return {
            key: _types_alone(value)
            for key, value in schema.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [_types_alone(value) for value in schema] if isinstance(schema, list) else schema
