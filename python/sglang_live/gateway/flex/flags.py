"""Flags of flex requests."""

import argparse

from sglang_live.gateway.flex.gate import FlexConfig

_DEFAULTS = FlexConfig()


def add_flex_arguments(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--flex-at-once",
        type=int,
        default=_DEFAULTS.at_once,
        metavar="N",
        help="HTTP requests of service tier flex that run at the same time; others wait "
        "(default: %(default)d)",
    )


def add_batch_key_argument(flags: argparse._ActionsContainer) -> None:
    flags.add_argument(
        "--batch-only-key",
        action="append",
        metavar="KEY",
        help="accepted key whose requests are all flex, and which opens no session; may be given "
        "several times",
    )


def flex_config(own: argparse.Namespace) -> FlexConfig:
    """Raises BadInputError for values that are not positive."""
    return FlexConfig(at_once=own.flex_at_once)
