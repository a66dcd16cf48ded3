"""Flags of the Batch API."""

import argparse
import math

from sglang_live.errors import BadInputError
from sglang_live.gateway.batch.config import BatchConfig

_GIB = 1 << 30
_DEFAULTS = BatchConfig()


def add_batch_arguments(flags: argparse._ActionsContainer) -> None:
    add = flags.add_argument
    add(
        "--batch-dir",
        metavar="DIR",
        help="serve /v1/files and /v1/batches, and keep their files and results in this folder",
    )
    add(
        "--batch-at-once",
        type=int,
        default=_DEFAULTS.at_once,
        metavar="N",
        help="lines of batches that run at the same time, fewer beside sessions, and at most 8 "
        "where the engines do not say what they take (default: %(default)d)",
    )
    add(
        "--batch-gib-per-key",
        type=float,
        default=_DEFAULTS.max_key_bytes / _GIB,
        metavar="GIB",
        help="size of the files of one key, results included (default: %(default)g)",
    )


def batch_config(own: argparse.Namespace) -> BatchConfig:
    """Raises BadInputError for values that are not positive."""
    if own.batch_at_once < 1:
        raise BadInputError(f"batch-at-once must be at least 1, got {own.batch_at_once}")
    if not 0 < own.batch_gib_per_key < math.inf:
        raise BadInputError("batch-gib-per-key must be positive")
    max_key_bytes = max(1, int(own.batch_gib_per_key * _GIB))
    return BatchConfig(at_once=own.batch_at_once, max_key_bytes=max_key_bytes)
