"""One thinker stage alone, for benchmarks that take the gateway's part."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from benchmark.ending import end_like_ctrl_c
from lab.attachment import joined
from lab.modelled_device.attach import environment as modelled_device
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.family import ModelFacts, model_facts
from sglang_live.policy.policies import Policies
from sglang_live.stage_specs import weights_environment
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor, loopback_address

# The scheduler reports twice a second.
_REPORTED_S = 1.0


@contextlib.asynccontextmanager
async def thinker(
    policies: tuple[str, ...],
    engine_args: dict | None = None,
    environment: dict[str, str] | None = None,
    device_model: Path | None = None,
    *,
    shallow: bool = False,
    model: ModelFacts | None = None,
) -> AsyncIterator[Replica]:
    """A thinker of the demo model whose responses never end by themselves, or of another model.

    So every run of a workload makes the same number of tokens. SGLang's API is reached by
    benchmark.native_client.

    Args:
        model: None: the demo model.
        device_model: file of a device model; None: the machine itself.
        shallow: whether the model has one layer: what computes beneath a modelled device must take
            less time than the device would.
    """
    end_like_ctrl_c()
    owned = RunDir.make()
    run_dir = owned.path
    model = model or _endless_demo(run_dir / "endless", shallow=shallow)
    spec = StageSpec(
        stage="thinker",
        replica=0,
        model_path=str(model.path),
        family=model.family,
        cache_dir=str(run_dir),
        address=loopback_address(run_dir, "thinker", 0),
        same_host=True,
        run_dir=str(run_dir),
        served_name="demo",
        native_key="benchmark",
        policies=Policies.parse(policies),
        engine_args=engine_args or {},
        environment=joined(
            modelled_device(device_model),
            weights_environment("thinker", "", model) | (environment or {}),
        ),
    )
    supervisor = Supervisor([spec], log_dir=run_dir)
    try:
        await supervisor.start()
        yield supervisor.replicas[0]
    finally:
        await supervisor.stop()
        owned.remove()


def _endless_demo(checkpoint: Path, *, shallow: bool) -> ModelFacts:
    size = DemoSize(thinker_end_logit=0.0)
    build(checkpoint, replace(size, thinker_layers=1) if shallow else size)
    return model_facts(checkpoint)


async def load_of(replica: Replica) -> dict[str, float]:
    """The stage's load report, after the next update."""
    await asyncio.sleep(_REPORTED_S)
    return (await replica.client.ping(10.0)).load


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Growth of each total. The policies' names are without their prefix."""
    return {
        name.removeprefix("policy_"): total - before.get(name, 0.0) for name, total in after.items()
    }
