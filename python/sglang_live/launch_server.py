"""Starts the server: `python -m sglang_live.launch_server --model-path demo`.

Composition root: makes the stages, the orchestrator and the gateway, and serves until a signal.
"""

import gc
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from sglang_live.aio import close_all, failed_tasks
from sglang_live.arguments import parse
from sglang_live.bridge.platform.media_urls import PRIVATE_MEDIA_ENV
from sglang_live.capacity.control import CapacityControl
from sglang_live.clock import Clock, MonotonicClock
from sglang_live.config import ServerConfig, SessionStorage
from sglang_live.devices import UsedDevices, check_devices, devices_of_ranks
from sglang_live.environment import provide_home, start_in_utf8_mode
from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.agent_check import AgentCheck
from sglang_live.gateway.app import build_app
from sglang_live.gateway.auth import share_secret
from sglang_live.gateway.call.settings import TurnConfig
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.connection_guard import ConnectionGuard, ConnectionLimits
from sglang_live.gateway.draining import Drain
from sglang_live.gateway.http.body import MAX_FRAME_BYTES
from sglang_live.gateway.http.health import SERVING, Health
from sglang_live.gateway.journal_flags import JournalConfig
from sglang_live.gateway.listen_socket import ListenSocket
from sglang_live.gateway.model import ServedModel
from sglang_live.gateway.native.limits import NativeLimits, found_in_templates
from sglang_live.gateway.native.upstream import NativeConfig
from sglang_live.gateway.parts import GatewayAddition, GatewayParts
from sglang_live.interaction.endpoint import SmartTurnModel, installed_model_path
from sglang_live.model_flags import check_flags, check_sizes
from sglang_live.models.composition import fetched
from sglang_live.models.family import ModelFacts, family_at
from sglang_live.models.packages import RESEMBLYZER
from sglang_live.models.resemblyzer import SpeakerEncoder
from sglang_live.open_files import raise_open_files
from sglang_live.orchestrator.directory import (
    FileDirectory,
    FollowedStages,
    StageDirectory,
    StaticDirectory,
)
from sglang_live.orchestrator.sessions import Orchestrator
from sglang_live.orchestrator.suspects import Suspects
from sglang_live.preflight import (
    check_certificate,
    check_log_folder,
    check_recordings,
    check_shared_memory,
    check_storage,
    check_temporary_folder,
)
from sglang_live.shutdown import Server, start_or_interrupt, stop_on_signals
from sglang_live.stage_specs import stage_specs
from sglang_live.stages.run_dir import RunDir, clear_dead
from sglang_live.stages.spec import STAGES, StageSpec
from sglang_live.stages.supervisor import Replica, StageCollector, Supervisor
from sglang_live.stages.transport.wire import fallbacks
from sglang_live.stages.zygote import Zygote, is_useful
from sglang_live.telemetry.capacity_metrics import CapacityCollector
from sglang_live.telemetry.log_lines import log_in_lines
from sglang_live.telemetry.log_writing import LogDrops, protect_own_output
from sglang_live.telemetry.metrics import GatewayMetrics

if TYPE_CHECKING:  # without one it is not imported
    from sglang_live.journal.journal import Journal

log = logging.getLogger("sglang_live")


def main(argv: list[str] | None = None) -> int:
    os.umask(0o077)  # sockets, copies of speech and logs are for the server's user alone
    drops = LogDrops()
    protect_own_output(drops)
    log_in_lines("")
    return end_in_one_line(lambda: _main(sys.argv[1:] if argv is None else argv, drops))


def _main(argv: list[str], drops: LogDrops) -> int:
    config = parse(argv)
    folders = config.folders
    log_in_lines("", as_json=folders.log_format == "json")
    if folders.log_dir is not None:
        check_log_folder("--log-dir", folders.log_dir)
    if folders.timeline_dir is not None:
        check_log_folder("--timeline-dir", folders.timeline_dir)
    if config.listen.ssl_certfile is not None:
        check_certificate(config.listen.ssl_certfile, config.listen.ssl_keyfile)
    check_machine(config.session_storage)
    check_devices(_used_devices(config))
    limits = connection_limits(config)
    raise_open_files(config.capacity.max_sessions, limits.per_address + limits.silent)
    model = config.model.load(folders.cache_dir)
    check_flags(config, model)
    check_sizes(config, model)
    check_recordings(model)
    _speaker_model(config)  # a download that fails does so before the stages start
    provide_home(folders.cache_dir)
    return uvloop.run(_serve(config, model, drops))


def _used_devices(config: ServerConfig) -> list[UsedDevices]:
    """Of the replicas that the server starts."""
    added = [used for addition in config.additions for used in addition.devices()]
    return added + [
        UsedDevices(f"--{name}.device", devices_of_ranks(device, stage.args), stage.names_devices)
        for name, stage in config.stages.items()
        if not stage.connect and config.directory is None
        for device in stage.devices
    ]


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    return replace(config.connections, max_sessions=config.capacity.max_sessions)


def end_in_one_line(run: Callable[[], int]) -> int:
    """Returns the exit status of `run`; an error becomes the last line of stderr.

    2: the arguments cannot be used, as argparse has it. 1: any other error.
    """
    status = 1
    try:
        return run()
    except LiveError as error:
        text = str(error)
        status = 2 if isinstance(error, BadInputError) else 1
    except KeyboardInterrupt:
        text = "interrupted"
    except Exception as error:
        log.exception("start_failed")
        text = f"{type(error).__name__}: {error}"
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return status


def check_machine(storage: SessionStorage) -> None:
    """Raises LiveError for faults that would end the start of an engine minutes later."""
    clear_dead()  # first, because leftovers of dead servers may fill the folders
    check_temporary_folder()
    check_shared_memory()
    if storage.directory is not None:
        check_storage(storage.directory, storage.n_bytes)


async def _serve(config: ServerConfig, model: ModelFacts, drops: LogDrops) -> int:
    journal = _journal(config.journal) if config.journal.url else None
    listen_socket = ListenSocket(config.listen.host, config.listen.port)
    agent_socket = None
    if config.listen.agent_port is not None:
        agent_socket = ListenSocket(config.listen.host, config.listen.agent_port)
    run_dir, native_key = RunDir.make(), secrets.token_urlsafe(32)
    if config.media.allow_private_media_urls:
        os.environ[PRIVATE_MEDIA_ENV] = "1"  # the engine checks where URLs redirect
    zygote, clock = Zygote() if is_useful() else None, MonotonicClock()
    suspects = Suspects(clock)
    capacity = replace(config.capacity, adapts=config.policies.admission)
    directory = _directory(config, model, run_dir.path, native_key, clock)
    supervisor = Supervisor(
        directory.specs,
        log_dir=config.folders.log_dir,
        on_change=_announce,
        zygote=zygote,
        drops=drops,
        on_death=suspects.died,
    )
    followed = FollowedStages(directory, supervisor, model.stages, clock)
    try:
        if journal is not None:
            await journal.start()
        for addition in config.additions:
            addition.start(run_dir.path)
        if model.has_thinker:
            # Seconds that the first client who forces a function call would wait for.
            threading.Thread(target=import_module, args=("xgrammar",), daemon=True).start()
        await start_or_interrupt(followed.start())
        orchestrator = Orchestrator(
            supervisor,
            model_name=config.served_model_name,
            voices=model.voices,
            capacity=CapacityControl(capacity, clock, lambda: orchestrator.pools()),
            policies=config.policies,
            clock=clock,
            suspects=suspects,
            talker_reads_text=model.talker_reads_text,
            duplex_s=model.duplex_s,
            own_voice=model.own_voice,
        )
        metrics, drain = _metrics(supervisor, orchestrator, drops), Drain()
        if config.directory is not None:
            metrics.registry.register(followed)
        for addition in config.additions:
            for collector in addition.collectors():
                metrics.registry.register(collector)
        if journal is not None:
            metrics.registry.register(journal)
        app = _application(
            config, model, followed, orchestrator, metrics, drain, agent_socket, journal
        )
        server = Server(_http(config, app, metrics))
        gc.collect()
        gc.freeze()  # see EngineHost.freeze
        stop_on_signals(server, drain, config.drain_s)
        listen_socket.open()
        scheme = "https" if config.listen.ssl_certfile else "http"
        url = f"{scheme}://{listen_socket.location}"
        print(f"serving {config.served_model_name} on {url}", flush=True)
        if agent_socket is not None:
            print(f"agent check on {agent_socket.location}", flush=True)
        await server.serve(sockets=[listen_socket.socket])
        return 0 if server.started else 1
    finally:
        forks = () if zygote is None else (zygote.close,)
        added = [addition.stop for addition in config.additions]
        sockets = [one.close for one in (listen_socket, agent_socket) if one is not None]
        journals = () if journal is None else (journal.close,)
        await close_all(
            *sockets,
            *journals,
            followed.stop,
            supervisor.stop,
            *added,
            *forks,
            run_dir.remove,
        )


def _journal(config: JournalConfig) -> "Journal":
    """Raises BadInputError: its key, its URL or its packages cannot be used."""
    try:
        from sglang_live.journal.journal import Journal, open_store
        from sglang_live.journal.records import FleetKey

        store = open_store(config.url)
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"--journal needs {error.name}: pip install 'sglang-live[journal]'"
        ) from error
    assert config.key_file is not None, "it is checked"
    key = FleetKey.load(config.key_file)
    share_secret(key.derived("owners"))
    return Journal(store, key, MonotonicClock(), keep_s=config.keep_s)


def _directory(
    config: ServerConfig, model: ModelFacts, run_dir: Path, native_key: str, clock: Clock
) -> StageDirectory:
    if config.directory is None:
        return StaticDirectory(stage_specs(config, model, run_dir, native_key))
    options = config.stage_options
    return FileDirectory(
        config.directory,
        key_file=options.stage_key_file,
        keyless=options.allow_keyless_stages,
        run_dir=run_dir,
        clock=clock,
    )


def _metrics(supervisor: Supervisor, orchestrator: Orchestrator, drops: LogDrops) -> GatewayMetrics:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.registry.register(StageCollector(lambda: supervisor.replicas))
    metrics.registry.register(CapacityCollector(orchestrator.capacity.report))
    metrics.registry.register(drops)
    metrics.registry.register(orchestrator.suspects)
    metrics.registry.register(orchestrator.speculations)
    metrics.registry.register(orchestrator.lost_jobs)
    metrics.registry.register(fallbacks)
    metrics.registry.register(failed_tasks)
    metrics.registry.register(supervisor.queue_counts)
    return metrics


def _application(
    config: ServerConfig,
    model: ModelFacts,
    followed: FollowedStages,
    orchestrator: Orchestrator,
    metrics: GatewayMetrics,
    drain: Drain,
    agent_socket: ListenSocket | None,
    journal: "Journal | None",
) -> Starlette:
    # SGLang's own API listens on a Unix socket: a thinker on another host cannot offer it.
    native = next((spec for spec in followed.directory.specs if spec.native_key), None)
    health = partial(_health, followed)
    additions = [addition.gateway for addition in config.additions]
    if agent_socket is not None:
        additions.append(partial(AgentCheck, agent_socket, health))
    if (url := config.limits.shared_limits) is not None:
        additions.append(partial(_shared_limits(), url))
    elif (n := config.limits.gateways) > 1:
        log.warning("limits_divided gateways=%d: each grants this part of the limits of a key", n)
    return build_app(
        orchestrator,
        config=_gateway_config(config, model, native),
        native_url="http://native" if native else None,
        health=health,
        metrics=metrics,
        endpoint_model=_endpoint_model() if model.has_thinker else None,
        speaker_model=_speaker_model(config),
        suspects=orchestrator.suspects,
        drain=drain,
        native_limits=NativeLimits(
            vocab_size=model.vocab_size,
            context_tokens=_context(config, model),
            **found_in_templates(model.weights),
            takes_priority=_takes_priority(config.stages["thinker"].args),
        ),
        journal=journal,
        additions=additions,
    )


def _shared_limits() -> Callable[[str, GatewayParts], GatewayAddition]:
    """Imported when it is used, with its client of the store."""
    try:
        made: Callable[[str, GatewayParts], GatewayAddition] = import_module(
            "sglang_live.gateway.shared_limits"
        ).SharedLimits
    except ImportError as error:
        raise BadInputError(
            f"--shared-limits needs the extra journal: pip install 'sglang-live[journal]' ({error})"
        ) from error
    return made


def _gateway_config(
    config: ServerConfig, model: ModelFacts, native: StageSpec | None
) -> GatewayConfig:
    """native: the thinker that serves SGLang's own API; None: no thinker of this machine."""
    recognises = family_at(model.family).recogniser is not None
    introduction, scheduling = config.model.introduction, config.scheduling
    policies = scheduling.policies
    return GatewayConfig(
        model=ServedModel(
            has_language_model=model.has_thinker,
            aliases=config.model_alias,
            about=introduction.about,
            suggestions=introduction.suggestions,
            recognises=recognises,
            hears=model.hears,
            recogniser_gives=model.recogniser_gives,
            hears_one_utterance=model.hears_one_utterance,
            sees=model.sees,
            watches=model.watches,
            knows_voices=config.speaker_model is not None,
            follows_instructions=model.follows_instructions,
        ),
        keys=config.keys,
        limits=config.limits.of_server(config.capacity.max_sessions, len(config.keys.api_keys)),
        media=config.media,
        text_server=config.text_server,
        webrtc=config.webrtc,
        telephony=config.telephony,
        is_loopback=config.listen.is_loopback,
        flex=config.flex,
        turns=TurnConfig(
            speculate_ms=scheduling.speculation_ms(recognises=recognises)
            if model.has_thinker
            else None,
            # A chunk of a fixed length ends within a word, which a recogniser needs as a whole. Ids
            # of a chunk are others than in the whole utterance.
            turn_prefill_s=(
                scheduling.turn_prefill_s
                if policies.turn_prefill and not (recognises or model.own_voice)
                else None
            ),
            prefills_at_pauses=policies.turn_prefill and recognises,
            preheat=policies.preheat,
        ),
        native=NativeConfig(
            native_api_key=native.native_key if native else None,
            native_socket=native.native_socket if native else None,
        ),
        retention=config.kept_by(model),
        timeline_dir=config.folders.timeline_dir,
    )


def _http(config: ServerConfig, app: Starlette, metrics: GatewayMetrics) -> uvicorn.Config:
    http = uvicorn.Config(
        app,
        host=config.listen.host,
        port=config.listen.port,
        log_level="warning",
        ssl_certfile=config.listen.ssl_certfile,
        ssl_keyfile=config.listen.ssl_keyfile,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,  # base64 of audio hardly compresses
        timeout_graceful_shutdown=5,
    )
    ConnectionGuard(connection_limits(config), metrics.clients_dropped).protect(http)
    return http


def _announce(replica: Replica, what: str) -> None:
    if what == "up" and replica.ready is not None:
        print(f"stage {replica.spec.name} ready in {replica.ready.startup_s:.1f} s", flush=True)
    else:
        log.error("stage %s %s", replica.spec.name, what)


def _endpoint_model() -> SmartTurnModel | None:
    path = installed_model_path()
    if path is None:
        print("no endpoint model: with semantic_vad only silence ends turns", flush=True)
        return None
    return SmartTurnModel(path)


def _speaker_model(config: ServerConfig) -> SpeakerEncoder | None:
    """Fetched at first use."""
    if config.speaker_model is None:
        return None

    def report(line: str) -> None:
        print(line, flush=True)

    return SpeakerEncoder.load(fetched(RESEMBLYZER, config.folders.cache_dir, report))


def _context(config: ServerConfig, model: ModelFacts) -> int:
    given = config.stages["thinker"].args.get("context_length")
    return given if type(given) is int else model.context_tokens


def _takes_priority(args: Mapping[str, object]) -> bool:
    """Whether the thinker accepts priorities and does not order requests by them.

    With SGLang's own priority scheduling a request without a priority comes after all others, so
    that one of -1 would go before it.
    """
    names = ("enable_priority_scheduling", "abort_on_priority_when_disabled")
    return not any(args.get(name) for name in names)


def _health(followed: FollowedStages) -> Health:
    """Of the stages: sessions go on without a process that an extension adds."""
    replicas = [one for one in followed.supervisor.replicas if one.spec.stage in STAGES]
    states = {one.spec.name: SERVING if one.is_up else one.state for one in replicas}
    present = {one.spec.stage for one in replicas}
    return Health(states | {stage: "absent" for stage in followed.stages if stage not in present})


if __name__ == "__main__":
    start_in_utf8_mode()
    sys.exit(main())
