"""The result of a check, and the error of one that cannot run on this machine."""

from dataclasses import dataclass, field
from typing import Any


class CannotRunError(Exception):
    """The machine lacks a requirement of the check, named in the message. Not a failure."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of a check.

    Attributes:
        figures: measurements, ready for JSON.
        problems: one sentence per problem; empty if the check passed.
        lines: the figures as text.
        files: further files, by the end of their name.
    """

    figures: dict[str, Any]
    problems: tuple[str, ...]
    lines: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
