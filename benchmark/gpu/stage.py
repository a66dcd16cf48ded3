"""One stage process, as the server starts it, with arguments of its engine."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmark.ending import end_like_ctrl_c
from benchmark.gpu.places import gpus_hidden, indexed
from sglang_live.models.family import model_facts
from sglang_live.stages.run_dir import RunDir
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.supervisor import Replica, Supervisor, loopback_address

LOG_TAIL_LINES = 20


@asynccontextmanager
async def running_stage(
    stage: str,
    checkpoint: Path,
    device: str,
    engine_args: dict[str, Any],
    start_timeout_s: float,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Replica]:
    """On an error, the end of the stage's log is printed."""
    end_like_ctrl_c()
    owned = RunDir.make()
    run_dir = owned.path
    spec = StageSpec(
        stage=stage,
        replica=0,
        model_path=str(checkpoint),
        family=model_facts(checkpoint).family,
        cache_dir=str(checkpoint.parent),
        address=loopback_address(run_dir, stage, 0),
        same_host=True,
        run_dir=str(run_dir),
        served_name="demo",
        native_key="benchmark" if stage == "thinker" else "",
        device=indexed(device),
        engine_args=engine_args,
        environment=environment or {},
    )
    supervisor = Supervisor([spec], log_dir=run_dir)
    try:
        with gpus_hidden(device == "cpu"):
            async with asyncio.timeout(start_timeout_s):
                await supervisor.start()
        yield supervisor.replicas[0]
    except Exception:
        log = (run_dir / f"{stage}-0.log").read_text("utf-8", errors="replace").splitlines()
        print("\n".join(log[-LOG_TAIL_LINES:]), file=sys.stderr)
        raise
    finally:
        await supervisor.stop()
        owned.remove()
