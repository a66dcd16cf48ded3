"""What --elastic-kv adds to a server: a part of each engine's scheduler, and the mover."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace
from prometheus_client.registry import Collector

from sglang_live.errors import BadInputError
from sglang_live.extension import Addition
from sglang_live.extensions.elastic.messages import ELASTIC_ENV, STAGES
from sglang_live.extensions.elastic.metrics import KvMoverCollector
from sglang_live.extensions.elastic.mover import KvMover
from sglang_live.models.family import ModelFacts
from sglang_live.stages.spec import StageSpec

_PART = "sglang_live.extensions.elastic.engine.part:Elastic"
# With it, SGLang on a GPU sizes the pool after its graphs are captured, and allocates it in a way
# of its own.
_POST_CAPTURE_ENV = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


class ElasticPools(Addition):
    def __init__(self) -> None:
        self.mover = KvMover()

    def check(self, model: ModelFacts) -> None:
        if not set(STAGES) <= set(model.stages):
            raise BadInputError(
                "--elastic-kv: this model has no other engine to exchange memory with"
            )

    def stages(self, specs: Sequence[StageSpec]) -> list[StageSpec]:
        return [_elastic(spec) if spec.stage in STAGES else spec for spec in specs]

    def start(self, run_dir: Path) -> None:
        self.mover.start(_socket_in(run_dir))

    async def stop(self) -> None:
        await self.mover.stop()

    def collectors(self) -> Iterable[Collector]:
        return (KvMoverCollector(self.mover.report),)


def _elastic(spec: StageSpec) -> StageSpec:
    path = str(_socket_in(Path(spec.run_dir)))
    added = {ELASTIC_ENV: json.dumps([path, spec.stage])}
    if _POST_CAPTURE_ENV in os.environ:
        added[_POST_CAPTURE_ENV] = "0"
    return replace(spec, environment=spec.environment | added, parts=(*spec.parts, _PART))


def _socket_in(run_dir: Path) -> Path:
    return run_dir / "kv-mover"
