"""A stage process: `python -m sglang_live.stages.runtime`, started by the supervisor.

The spec comes in the environment. SGLang's own child processes inherit that environment, and
through the plugin entry point the seams of this stage.
"""

import asyncio
import gc
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol, runtime_checkable

import setproctitle

from sglang_live.aio import failed_tasks
from sglang_live.attachment import attach
from sglang_live.bridge.platform import cpu, torchvision_shim
from sglang_live.bridge.platform.load_file import SHM_NAMES_ENV
from sglang_live.bridge.scheduler.progress_lock import forgo_progress_lock
from sglang_live.engine_channel.device_turn import TURNS_ENV
from sglang_live.engine_channel.inbox import (
    PARTS_ENV,
    POLICIES_ENV,
    STAGE_ENV,
    STORAGE_ENV,
)
from sglang_live.errors import SeamError
from sglang_live.messages import Ready, SessionHint
from sglang_live.models.duplex_talker import DuplexTalker
from sglang_live.models.family import family_at, part
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.stages.endings import die_with_parent
from sglang_live.stages.spec import STAGES, StageSpec
from sglang_live.stages.transport.protocol import protocol_hash
from sglang_live.stages.transport.server import ServedJob, StageServer
from sglang_live.stages.transport.wire import fallbacks, shm_names
from sglang_live.telemetry.log_lines import engine_logging, log_in_lines

log = logging.getLogger(__name__)

# Here, because the processes that SGLang spawns import this module before any other.
torchvision_shim.install()

# Thinker, talker and vocoder work at the same time, on a machine without a GPU on the same cores.
N_COMPUTING = 3
# There the gateway runs on the same cores. It needs little time, but without delay.
STAGE_NICE = 5
# With pacing the talker pauses while it is ahead; then stages nearer to the user go first.
_PACED_NICE = {"thinker": 4, "talker": 3, "vocoder": 1}


class Stage(Protocol):
    """What a stage implements. There is one per process, built before any job."""

    async def start(self) -> None: ...

    async def run(self, job: ServedJob) -> None: ...

    async def close_session(self, session_id: str) -> None: ...

    def load(self) -> dict[str, float]: ...


@runtime_checkable
class TakesHints(Protocol):
    """A stage that keeps KV of sessions between turns, and plans with hints about them."""

    def on_hint(self, hint: SessionHint) -> None: ...


def build_stage(spec: StageSpec) -> tuple[Stage, asyncio.AbstractEventLoop]:
    """The stage and the event loop it must run in. Heavy imports happen here, per stage."""
    if spec.stage == "thinker":
        from sglang_live.stages.thinker.stage import ThinkerStage

        thinker = ThinkerStage(spec)
        return thinker, thinker.engine.loop
    if spec.stage == "talker":
        from sglang_live.stages.talker.stage import TalkerStage, load_talker

        model = load_talker(spec)
        if isinstance(model, PieceTalker):
            from sglang_live.stages.talker.piece_stage import PieceStage

            pieces = PieceStage(spec, model)
            return pieces, pieces.engine.loop
        if isinstance(model, DuplexTalker):
            from sglang_live.stages.talker.duplex_stage import DuplexStage

            duplex = DuplexStage(spec, model)
            return duplex, duplex.engine.loop
        talker = TalkerStage(spec, model)
        return talker, talker.engine.loop
    if spec.stage == "vocoder" and family_at(spec.family).decoder is None:
        from sglang_live.stages.vocoder.reading import ReadingStage

        return ReadingStage(spec), asyncio.new_event_loop()
    if spec.stage == "vocoder":
        from sglang_live.stages.vocoder.stage import VocoderStage

        return VocoderStage(spec), asyncio.new_event_loop()
    if spec.factory:
        return part(spec.factory)(spec), asyncio.new_event_loop()
    raise ValueError(f"no stage is called {spec.stage!r}")


async def serve(stage: Stage, spec: StageSpec, began_s: float) -> None:
    await stage.start()
    # Now instead of during a session; see EngineHost.freeze.
    gc.collect()
    gc.freeze()
    startup_s = time.monotonic() - began_s

    def ready() -> Ready:
        return Ready(
            "",
            stage=spec.stage,
            pid=os.getpid(),
            startup_s=startup_s,
            load={
                **stage.load(),
                "jobs": float(server.n_jobs),
                "malformed": float(server.n_malformed),
                "jobs_refused": float(server.n_refused),
                "sessions_taken_over": float(server.n_taken_over),
                "jobs_flooded": float(server.counts.flooded),
                "queue_full": float(server.counts.full),
                "shared_memory_full": float(fallbacks.n),
                "tasks_failed": float(failed_tasks.n_by_name.total()),
            },
            protocol=protocol_hash(),
        )

    server = StageServer(
        spec.address,
        same_host=spec.same_host,
        interrupts=spec.policies.truncate,
        shm_run=spec.run,
        key_file=spec.key_file,
        run=stage.run,
        close_session=stage.close_session,
        ready=ready,
        on_hint=stage.on_hint if isinstance(stage, TakesHints) else None,
    )
    await server.serve()


def use_temporary_folder(spec: StageSpec) -> None:
    """Put SGLang's temporary files into the server's folder, with which they are removed."""
    folder = Path(spec.run_dir) / "tmp"
    if not folder.is_dir():
        return
    # Kernels that torch has compiled are kept for later runs.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{spec.cache_dir}/torchinductor")
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # a forked process has read it already


def set_up_logs(spec: StageSpec) -> None:
    """Of this process and, through a file that SGLang reads, of the engine's processes."""
    as_json = spec.log_format == "json"
    log_in_lines(spec.name, as_json=as_json)
    path = spec.file_path("logging.json")
    path.write_text(json.dumps(engine_logging(spec.name, as_json)), "utf-8")
    # SGLang's own variable: a file that the operator set there is used.
    os.environ.setdefault("SGLANG_LOGGING_CONFIG_PATH", str(path))


def main() -> None:
    began_s = time.monotonic()
    spec = StageSpec.from_env()
    os.umask(0o077)  # only the server's user may read sockets, speech and logs
    setproctitle.setproctitle(f"sglang_live::{spec.name}")
    if not spec.alone:
        die_with_parent()
    # For the engine's own processes, which inherit them.
    os.environ[STAGE_ENV] = spec.stage
    os.environ[POLICIES_ENV] = ",".join(spec.policies.names)
    os.environ[STORAGE_ENV] = spec.session_storage
    # Those that the environment names already are of every stage.
    parts = filter(None, (os.environ.get(PARTS_ENV), *spec.parts))
    os.environ[PARTS_ENV] = ",".join(parts)
    os.environ[SHM_NAMES_ENV] = shm_names(spec.run, os.getpid())
    use_temporary_folder(spec)
    forgo_progress_lock()
    if spec.stage in STAGES:  # others compute nothing
        os.environ[TURNS_ENV] = spec.turns
    set_up_logs(spec)
    logging.getLogger("sglang").setLevel(logging.WARNING)
    if cpu.is_active():
        import torch

        os.nice(_PACED_NICE.get(spec.stage, STAGE_NICE) if spec.policies.pacing else STAGE_NICE)
        torch.set_num_threads(1)
        cpu.share_cores(N_COMPUTING)
    try:
        attach("stage")
        stage, loop = build_stage(spec)
        loop.run_until_complete(serve(stage, spec, began_s))
    except SeamError as error:
        sys.exit(f"sglang_live refuses to start: {error}")
    except Exception as error:
        log.exception("stage_failed")
        # The operator reads the last line of a failed start.
        sys.exit(f"error: {type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
