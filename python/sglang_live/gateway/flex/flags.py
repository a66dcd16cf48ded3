"""Flags of flex requests."""

import argparse

from sglang_live.gateway.flex.gate import FlexConfig

_DEFAULTS = FlexConfig()


def add_flex_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flex-at-once",
        type=int,
        default=_DEFAULTS.at_once,
        metavar="N",
        help="HTTP requests of service tier flex that run at the same time; others wait "
        "(default: %(default)d)",
    )
    parser.add_argument(
        "--batch-only-key",
        action="append",
        help="accepted key whose requests are all flex, and which opens no session; may be given "
        "several times",
    )


def flex_config(own: argparse.Namespace) -> FlexConfig:
    """Raises BadInputError for values that are not positive."""
    return FlexConfig(at_once=own.flex_at_once)
