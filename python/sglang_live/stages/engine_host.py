"""One SGLang engine inside a stage process, with the defaults a live stage needs."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import sglang as sgl

from sglang_live.aio import background, vital
from sglang_live.bridge import seams
from sglang_live.bridge.platform import cpu, cuda
from sglang_live.bridge.scheduler.watch import PROGRESS_ENV, ProgressCell
from sglang_live.clock import MonotonicClock
from sglang_live.errors import StageFailedError
from sglang_live.models.demo.location import is_demo
from sglang_live.stages.endings import EXIT_ENGINE_DIED, EXIT_STUCK
from sglang_live.stages.native_api import KeyGuard, restrict
from sglang_live.stages.ports import free_port
from sglang_live.stages.progress_watch import ProgressWatch
from sglang_live.stages.spec import StageSpec

log = logging.getLogger(__name__)

# A package in which SGLang looks for model classes, too.
EXTERNAL_MODELS_ENV = "SGLANG_EXTERNAL_MODEL_PACKAGE"
# Of the demo models, and of every model on a CPU.
SMALL_POOL_TOKENS = 65_536
# Prefills that graphs are captured for: a turn has some hundred tokens. A larger one runs eagerly,
# as does one that would be padded to more than twice its tokens.
PREFILL_GRAPH_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cc1plus", "c++", "g++", "clang", "hipcc")


def default_engine_args(device: str, *, demo: bool = False) -> dict[str, Any]:
    """Arguments of every engine, unless flags override them.

    demo: whether the engine runs a demo model.
    """
    args: dict[str, Any] = {
        "log_level": "warning",
        # An idle scheduler must not use a core: stages share the machine.
        "sleep_on_idle": True,
        # SGLang's own choice may be taken by another process before the scheduler listens on it.
        "nccl_port": free_port(),
        # Not served. SGLang derives ports from it, which must differ between engines.
        "port": free_port(),
    }
    if cpu.is_active():
        args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "dtype": "float32",
            "max_total_tokens": SMALL_POOL_TOKENS,
            "max_running_requests": 64,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "layer_first",
            "chunked_prefill_size": 512,
            "disable_custom_all_reduce": True,  # for CUDA
        }
    else:
        # SGLang reads the index from base_gpu_id, not from the device's name.
        kind, _, index = device.partition(":")
        args |= {
            "device": kind,
            "base_gpu_id": int(index or 0),
            # No GPU has run this project's models on them yet (bridge/prefill_graphs.py).
            "disable_prefill_cuda_graph": True,
        }
        if cuda.is_active():
            args |= {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
        if demo:
            # SGLang gives the first engine most of the GPU, and the second finds none.
            args |= {"max_total_tokens": SMALL_POOL_TOKENS, "mem_fraction_static": 0.3}
    return args


class EngineHost:
    """
    Args:
        args: SGLang server arguments; they override default_engine_args.
        engine: whose hooks its processes have (bridge/seams.py); the stage's by default.
    Raises:
        SeamError: a hook into SGLang did not land in this process.
    """

    def __init__(self, spec: StageSpec, args: dict[str, Any], engine: str | None = None):
        engine = engine or spec.stage
        if args.get("cuda_graph_backend_prefill") == "breakable":
            args = {"cuda_graph_bs_prefill": list(PREFILL_GRAPH_TOKENS), **args}
        self._stuck_after_s = spec.stuck_after_s
        self._cell = None
        if spec.policies or engine == "talker":  # others have SGLang's own scheduler
            path = spec.file_path("progress")
            os.environ[PROGRESS_ENV] = str(path)
            self._cell = ProgressCell(path)
        if args.get("nnodes", 1) == 1 and not args.get("dist_init_addr"):
            _meet_on_this_host(spec.file_path(f"ranks-{os.getpid()}"))
        if cpu.is_active():
            cpu.place_ranks(args.get("tp_size", 1) * args.get("pp_size", 1))
        self.engine = sgl.Engine(
            **{**default_engine_args(spec.device, demo=is_demo(spec.model_path)), **args}
        )
        # SGLang only logs a plugin that fails.
        seams.check_landed(engine)
        self.loop: asyncio.AbstractEventLoop = self.engine.loop
        # Whether the scheduler owes something other than the results of requests.
        self.owes: Callable[[], bool] = lambda: False

    async def stream(self, rid: str, **request: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Run one request and yield its cumulative outputs. Closing early aborts the request.

        Raises:
            StageFailedError: the engine refused or aborted the request.
        """
        finished = False
        try:
            chunks = await self.engine.async_generate(rid=rid, stream=True, **request)
            async for chunk in chunks:
                reason = chunk["meta_info"]["finish_reason"]
                finished = reason is not None
                if finished and reason["type"] == "abort":
                    raise StageFailedError(f"engine aborted: {reason.get('message')}")
                yield chunk
        except ValueError as error:
            # SGLang raises it for a request that it refuses or has aborted.
            finished = True
            raise StageFailedError(str(error)) from error
        finally:
            if not finished:
                self.engine.tokenizer_manager.abort_request(rid=rid)

    async def run(self, rid: str, **request: Any) -> dict[str, Any]:
        """The last output of a request."""
        last: dict[str, Any] = {}
        async for chunk in self.stream(rid, **request):
            last = chunk
        return last

    async def freeze(self) -> None:
        """Exclude what is loaded from Python's garbage collection, in all processes of the engine.

        A full collection visits some 600,000 objects of imported modules, which takes 0.4 s on a
        CPU core and stops all audio. Call it after a warm-up.
        """
        await self.engine.tokenizer_manager.freeze_gc()

    def watch_over(self) -> None:
        """Exit, to be started anew, when the engine dies or makes no progress.

        Call it after a warm-up, when SGLang has installed its own handlers, which this replaces:
        they end the process with SIGKILL, as if it had been killed from outside.
        """
        self.loop.add_signal_handler(signal.SIGQUIT, self._engine_died)
        self._watching = vital(self._watch_progress(), "watch progress")

    def _engine_died(self) -> None:
        # SGLang watches its processes and sends this signal when one ends.
        watchdog = self.engine.tokenizer_manager._subprocess_watchdog
        codes = [process.exitcode for process in watchdog._processes] if watchdog else []
        signals = [-code for code in codes if code in (-signal.SIGTERM, -signal.SIGKILL)]
        log.critical("engine_died exit_codes=%s", codes)
        logging.shutdown()
        os._exit(128 + signals[0] if signals else EXIT_ENGINE_DIED)

    async def _watch_progress(self) -> None:
        watch = ProgressWatch(self._stuck_after_s)
        clock = MonotonicClock()
        states = self.engine.tokenizer_manager.rid_to_state
        while True:
            await asyncio.sleep(min(1.0, self._stuck_after_s / 4))
            n_steps, round_tokens = self._progress()
            now_s = clock.now_s()
            has_work = bool(states) or self.owes()
            if not watch.look(now_s, has_work=has_work, n_steps=n_steps, round_tokens=round_tokens):
                continue
            if compiler := _running_compiler():
                log.warning("scheduler_compiles with=%s", compiler)
                watch.forgive(now_s)
                continue
            log.critical(
                "scheduler_stuck requests=%d limit_s=%.0f", len(states), self._stuck_after_s
            )
            logging.shutdown()
            os._exit(EXIT_STUCK)

    def _progress(self) -> tuple[float, int]:
        if self._cell is not None:
            return self._cell.read()
        # SGLang's own scheduler publishes its load after each round, and while requests wait.
        load = self.engine.tokenizer_manager.load_snapshot_reader.read(0)
        return (load.timestamp if load is not None else 0.0), 0

    def load(self) -> dict[str, float]:
        """Gauges of the engine, as the scheduler published them last."""
        load = self.engine.tokenizer_manager.load_snapshot_reader.read(0)
        if load is None:
            return {}
        return {
            "requests_running": float(load.num_running_reqs),
            "requests_waiting": float(load.num_waiting_reqs),
            "kv_tokens_used": float(load.num_used_tokens),
            "kv_tokens_total": float(load.max_total_num_tokens),
        }

    @property
    def context_tokens(self) -> int:
        """Limit of a prompt and its response together."""
        return self.engine.tokenizer_manager.context_len

    def prefill_tokens(self) -> tuple[int, int]:
        """Tokens of prompts computed so far, and left to compute, as of the latest prefill batch.

        SGLang does not count batches of more than 2 s in the first; the second includes them.
        """
        load = self.engine.tokenizer_manager.load_snapshot_reader.read(0)
        if load is None:
            return 0, 0
        return load.total_prefill_uncached_tokens, load.num_waiting_uncached_tokens

    async def serve_http(self, path: str, key: str) -> None:
        """Serve NATIVE_ROUTES of SGLang's HTTP API on a Unix socket, to requests with the key."""
        import uvicorn
        from sglang.srt.entrypoints import http_server

        engine = self.engine
        http_server.set_global_state(
            http_server._GlobalState(
                tokenizer_manager=engine.tokenizer_manager,
                template_manager=engine.template_manager,
                scheduler_info=engine._scheduler_init_result.scheduler_infos[0],
            )
        )
        app = http_server.app
        app.is_single_tokenizer_mode = True
        app.server_args = engine.server_args
        app.warmup_thread_kwargs = {
            "server_args": engine.server_args,
            "execute_warmup_func": lambda _: _mark_up(engine),
        }
        restrict(app)
        listener = socket.socket(socket.AF_UNIX)
        Path(path).unlink(missing_ok=True)  # of a stage that was killed
        listener.bind(path)
        Path(path).chmod(0o600)
        config = uvicorn.Config(KeyGuard(app, key), log_level="warning", lifespan="on")
        server = uvicorn.Server(config)
        self._http = background(server.serve(sockets=[listener]), "native http")
        while not server.started:
            if self._http.done():
                self._http.result()
            await asyncio.sleep(0.01)


def _meet_on_this_host(meeting: Path) -> None:
    """Have an engine's ranks find each other by a file, and exchange tensors over loopback.

    torch's TCP store, and gloo by the name of the host, listen on other interfaces too, even for a
    single rank.
    """
    meeting.unlink(missing_ok=True)
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{meeting}"
    names = {name for _, name in socket.if_nameindex()}
    # 25 MB of shared memory, which stays when the engine is killed. Nothing here would use it.
    os.environ.setdefault("SGLANG_USE_MESSAGE_QUEUE_BROADCASTER", "false")
    if loopback := next((name for name in ("lo", "lo0") if name in names), None):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def _running_compiler() -> str:
    """Name of a compiler among this process's descendants, which builds a kernel for its first
    use. "": none."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.name() in _COMPILERS:
                return process.name()
    return ""


def _mark_up(engine: sgl.Engine) -> bool:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    engine.tokenizer_manager.server_status = ServerStatus.Up
    # Otherwise SGLang posts to its own /freeze_gc, at a TCP port that another process may hold.
    return False
