"""A stage process for test_supervisor.py: does in its n-th life what the plan's n-th word says.

serve: answers pings, and holds every job open
exit:  ends with status 3 before it serves
raise: ends by an error before it serves
hang:  never serves
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from sglang_live.messages import Pcm, Ready
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.server import StageServer


def main() -> None:
    spec = StageSpec.from_env()
    lives = Path(spec.run_dir) / f"{spec.stage}-lives"
    with lives.open("a") as out:
        out.write(f"{os.getpid()}\n")
    plan = spec.engine_args["plan"]
    word = plan[min(len(lives.read_text().split()), len(plan)) - 1]
    print(f"this life: {word}", flush=True)
    if word == "exit":
        sys.exit(3)
    if word == "raise":
        raise ValueError("Not enough host memory available")
    if "child" in spec.engine_args:
        # As an engine's scheduler: a process of its own that does not watch its parent.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (Path(spec.run_dir) / "child").write_text(str(child.pid))
    if word == "hang":
        time.sleep(60)
    asyncio.run(_serve(spec))


async def _serve(spec: StageSpec) -> None:
    async def run(job) -> None:
        wire.SHM_MIN_BYTES = 0
        job.tensors().put(np.zeros(4))  # left in shared memory
        await job.send(Pcm(job.job_id, b"begun"))
        await asyncio.Event().wait()

    async def close_session(session_id: str) -> None: ...

    server = StageServer(
        spec.address,
        same_host=True,
        shm_run=spec.run,
        run=run,
        close_session=close_session,
        ready=lambda: Ready("", stage=spec.stage, pid=os.getpid(), startup_s=0.1),
    )
    await server.serve()


main()
