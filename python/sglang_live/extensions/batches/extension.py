"""The Batch API: /v1/files and /v1/batches, on a server with --batch-dir."""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_live.errors import BadInputError, LiveError
from sglang_live.extension import Addition, Extension
from sglang_live.extensions.batches.config import ROUTES, BatchConfig
from sglang_live.policy.policies import Policies

if TYPE_CHECKING:
    from sglang_live.gateway.additions import GatewayAddition, GatewayParts
    from sglang_live.stages.spec import StageConfig

_GIB = 1 << 30
_DEFAULTS = BatchConfig()


class NoBatchesError(LiveError):
    code = "batches_off"
    http_status = 404

    def __init__(self) -> None:
        super().__init__("This server has no Batch API: it runs without --batch-dir.")


class NoBatches(Addition):
    """Routes that name the flag."""

    def gateway(self, parts: "GatewayParts") -> "GatewayAddition":
        from sglang_live.gateway.additions import GatewayAddition, refusing

        refusals = GatewayAddition()
        refusals.routes = dict.fromkeys(ROUTES, refusing(NoBatchesError()))
        return refusals


class BatchesExtension(Extension):
    title = "batches"

    def add_flags(self, flags: argparse._ActionsContainer) -> None:
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

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: "Mapping[str, StageConfig]"
    ) -> Addition:
        if own.batch_at_once < 1:
            raise BadInputError(f"batch-at-once must be at least 1, got {own.batch_at_once}")
        if not 0 < own.batch_gib_per_key < math.inf:
            raise BadInputError("batch-gib-per-key must be positive")
        if not own.batch_dir:
            return NoBatches()
        from sglang_live.extensions.batches.api import Batches

        max_key_bytes = max(1, int(own.batch_gib_per_key * _GIB))
        config = BatchConfig(at_once=own.batch_at_once, max_key_bytes=max_key_bytes)
        return Batches(Path(own.batch_dir), config)


EXTENSION = BatchesExtension()
