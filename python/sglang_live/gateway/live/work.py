"""A task that a Live session delegates, and who does it: the port behind which a text model stands.

The served model is one TextModel (served_text.py), the operator's own another (text_server.py).
A session's Worker has it write responses (backend.py), or decides (decisions.py).
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_live.core import Usage

# Of the Responses API, checked: a message with text, a function_call, a function_call_output.
Item = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """
    model: the client's name for it. tools, tool_choice: checked, in the protocol's form.
    max_output_tokens: None: the model's limit.
    """

    model: str
    instructions: str | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "instructions": self.instructions,
            "tools": list(self.tools),
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_output_tokens": self.max_output_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    conversation: what was said, as messages. items: of the work, behind it.
    """

    settings: BackendSettings
    instructions: str
    conversation: tuple[Item, ...]
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Worked:
    """A response's end.

    calls: as the model wrote them, not checked.
    is_cut: it reached its limit of tokens.
    """

    calls: tuple[str, ...]
    usage: Usage
    is_cut: bool


class TextModel(Protocol):
    def work(self, task: Task) -> AsyncGenerator[str | Worked, None]:
        """The text of a response as it comes, then its end. Raises LiveError if it fails."""
        ...


class Worker(Protocol):
    """Does for a session what its voice delegates."""

    @property
    def at_work(self) -> bool: ...

    def delegate(self, delegation_id: str) -> dict[str, Any]:
        """The voice wants work done. Returns fields of the delegation: its target, and more."""
        ...

    def stop(self) -> None:
        """End all work. Nothing is emitted any more."""

    async def close(self) -> None: ...


def usage_json(usage: Usage) -> dict[str, Any]:
    read = usage.input_tokens
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_text_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + usage.output_text_tokens,
    }


def message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": text}
