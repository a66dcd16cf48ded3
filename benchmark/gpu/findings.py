"""What a check hands back, and how it says that it cannot run on this machine."""

from dataclasses import dataclass
from typing import Any


class CannotRunError(Exception):
    """This machine lacks something the check needs; the message says what. Not a failure."""


@dataclass(frozen=True, slots=True)
class Findings:
    """
    Attributes:
        figures: what was measured, ready for JSON.
        problems: what is wrong, one sentence each; empty: passed.
        lines: the figures for people.
    """

    figures: dict[str, Any]
    problems: tuple[str, ...]
    lines: tuple[str, ...]
