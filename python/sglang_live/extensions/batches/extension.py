"""The Batch API: /v1/files and /v1/batches, on a server with --batch-dir."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_live.errors import LiveError
from sglang_live.extension import Addition, Extension
from sglang_live.extensions.batches.config import ROUTES, BatchConfig
from sglang_live.policy.policies import Policies
from sglang_live.settings import Count, Positive, Settings, flag, read_flags

if TYPE_CHECKING:
    from sglang_live.gateway.parts import GatewayAddition, GatewayParts
    from sglang_live.stages.spec import StageConfig

_GIB = 1 << 30
_DEFAULTS = BatchConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFlags(Settings):
    batch_dir: Path | None = flag(
        None, "serve /v1/files and /v1/batches, and keep their files and results in this folder"
    )
    batch_at_once: Count = flag(
        _DEFAULTS.at_once,
        "lines of batches that run at the same time, fewer beside sessions, and at most 8 where "
        "the engines do not say what they take",
    )
    batch_gib_per_key: Positive = flag(
        _DEFAULTS.max_key_bytes / _GIB,
        "size of the files of one key, results included",
        value="GIB",
    )


class NoBatchesError(LiveError):
    code = "batches_off"
    http_status = 404

    def __init__(self) -> None:
        super().__init__("This server has no Batch API: it runs without --batch-dir.")


class NoBatches(Addition):
    """Routes that name the flag."""

    def gateway(self, parts: "GatewayParts") -> "GatewayAddition":
        from sglang_live.gateway.parts import GatewayAddition, refusing

        refusals = GatewayAddition()
        refusals.routes = dict.fromkeys(ROUTES, refusing(NoBatchesError()))
        return refusals


class BatchesExtension(Extension):
    title = "batches"
    flags = BatchFlags

    def addition(
        self, own: argparse.Namespace, policies: Policies, stages: "Mapping[str, StageConfig]"
    ) -> Addition:
        flags = read_flags(own, BatchFlags)
        if flags.batch_dir is None:
            return NoBatches()
        from sglang_live.extensions.batches.api import Batches

        max_key_bytes = max(1, int(flags.batch_gib_per_key * _GIB))
        config = BatchConfig(at_once=flags.batch_at_once, max_key_bytes=max_key_bytes)
        return Batches(flags.batch_dir, config)


EXTENSION = BatchesExtension()
