"""Flags of a benchmark: one for each field of a dataclass."""

import argparse
from dataclasses import asdict
from typing import Any, TypeVar

T = TypeVar("T")


def parser_of(default: Any, doc: str | None, **choices: Any) -> argparse.ArgumentParser:
    """
    Args:
        default: a dataclass of numbers, texts and truth values.
        doc: of the module, shown with --help.
        choices: permitted values, by field.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in asdict(default).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
        else:
            allowed = choices.get(name)
            parser.add_argument(flag, type=type(value), default=value, choices=allowed)
    return parser


def read_options(default: T, doc: str | None, argv: list[str] | None = None, **choices: Any) -> T:
    """The same dataclass with the values of the command line; exits if one is not permitted."""
    return type(default)(**vars(parser_of(default, doc, **choices).parse_args(argv)))


def check_names(parser: argparse.ArgumentParser, flag: str, names: str, known: Any) -> None:
    """Exit if one of the names, separated by commas, is unknown."""
    if unknown := set(names.split(",")) - set(known):
        parser.error(f"{flag}: unknown {sorted(unknown)}; there are {list(known)}")
