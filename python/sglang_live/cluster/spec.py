"""What a cluster is to have: cluster.toml.

    model_path = "/models/Qwen3-Omni"
    stage_key_file = "/etc/sglang_live/stage.key"
    zones = ["a", "b"]

    [[hosts]]
    name = "voice"
    stages = ["talker", "vocoder"]
    count = 2          # that are needed in each zone
    spare = 1          # beside them
    gpus = 1

    [hosts.scaling]    # only if their number follows the calls
    sessions = 40
    most = 12

    [gateways]
    count = 2
    host = "0.0.0.0"
    flags = ["--shared-limits=valkeys://valkey:6379"]

A host is some stages that share devices, and one supervisor. Its flags are those of launch_server.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sglang_live import __version__
from sglang_live.arguments import parse
from sglang_live.config import ServerConfig
from sglang_live.devices import devices_of_ranks
from sglang_live.errors import BadInputError
from sglang_live.models.family import ModelFacts
from sglang_live.stages.spec import STAGES
from sglang_live.stages.transport.protocol import protocol_hash

# In Ray.
NAMESPACE, MANAGER = "sglang_live", "ClusterManager"
# The group of gateways, beside those of hosts.
GATEWAYS = "gateways"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
# Flags of every process that the cluster gives itself.
_OWN_FLAGS = ("--model-path", "--directory", "--stage-key-file", "--allow-keyless-stages")


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class HostScaling(_Strict, frozen=True, kw_only=True):
    """Of hosts whose number follows the calls (capacity/scaling.py), from `count` on.

    sessions: that one host serves within the target (the planner says it).
    most: of these hosts in each zone, beside the spare ones; there are machines for all.
    cold_start_s: until a new host serves, a machine's start among it.
    """

    sessions: int
    most: int
    cold_start_s: float = 300.0


class HostGroup(_Strict, frozen=True, kw_only=True):
    """Equal hosts.

    stages: all that share its devices.
    count: of hosts that are needed in each zone. spare: more of them, also in each zone, so that
        one may fail or be replaced.
    cpus, gpus: of one host.
    flags: of its stages, as for launch_server. Devices are counted from 0 among its own GPUs.
    command: starts a stage, such as ["numactl", "--cpunodebind=0", "python3", "-m",
        "sglang_live.stages.runtime"]. Empty: this version's own.
    scaling: None: `count` is their number.
    """

    name: str
    stages: list[str]
    count: int = 1
    spare: int = 0
    cpus: float = 1.0
    gpus: int = 0
    flags: list[str] = []
    command: list[str] = []
    scaling: HostScaling | None = None

    def needed(self, wished: int) -> int:
        """How many of them a zone is to have beside the spare ones. wished: by the calls."""
        if self.scaling is None:
            return self.count
        return min(max(self.count, wished), self.scaling.most)


class GatewayGroup(_Strict, frozen=True, kw_only=True):
    """
    port: of each gateway; 0: any that is free.
    flags: as for launch_server.
    """

    count: int = 1
    spare: int = 0
    cpus: float = 1.0
    host: str = "127.0.0.1"
    port: int = 30000
    flags: list[str] = []


class ClusterSpec(_Strict, frozen=True, kw_only=True):
    """
    flags: of hosts and gateways, such as --max-sessions, which is of each of them.
    stage_key_file: on every machine; see launch_server. Empty: all hosts are on loopback.
    zones: values of a label of the nodes. Empty: zones do not matter. zone_label: Ray's own one.
    address: of every host, for the others; empty: as Ray knows it.
    drain_s: time after which a host or a gateway that drains is ended with what still runs in it.
    """

    model_path: str
    stage_key_file: str = ""
    flags: list[str] = []
    zones: list[str] = []
    zone_label: str = "ray.io/availability-zone"
    address: str = ""
    drain_s: float = 600.0
    hosts: list[HostGroup]
    gateways: GatewayGroup = GatewayGroup()

    def group(self, name: str) -> HostGroup | GatewayGroup | None:
        if name == GATEWAYS:
            return self.gateways
        return next((group for group in self.hosts if group.name == name), None)

    def size(self) -> tuple[int, float]:
        """How many hosts and gateways there are to be at most, and their CPUs."""
        n_zones, gateways = max(1, len(self.zones)), self.gateways
        most = [(one, one.scaling.most if one.scaling else one.count) for one in self.hosts]
        groups = [(n_zones * (n + one.spare), one.cpus) for one, n in most]
        groups.append((gateways.count + gateways.spare, gateways.cpus))
        return sum(n for n, _ in groups), sum(n * cpus for n, cpus in groups)

    def argv(self, group: HostGroup | GatewayGroup) -> list[str]:
        """Of one process of the group, as for launch_server."""
        argv = ["--model-path", self.model_path, *self.flags, *group.flags]
        if self.stage_key_file:
            argv += ["--stage-key-file", self.stage_key_file]
        if isinstance(group, GatewayGroup):
            argv += ["--host", group.host, "--port", str(group.port)]
        return argv

    def generation(self, name: str) -> str:
        """Another one for each change of what the processes of a group are, but not of how many."""
        group = self.group(name)
        assert group is not None
        settled = msgspec.structs.replace(group, count=1, spare=0)
        if isinstance(settled, HostGroup):
            settled = msgspec.structs.replace(settled, scaling=None)
        said = [self.argv(group), msgspec.to_builtins(settled), __version__, protocol_hash()]
        return hashlib.blake2b(msgspec.json.encode(said), digest_size=4).hexdigest()


def read_spec(path: Path) -> ClusterSpec:
    """Raises BadInputError, with the place in the file, for what is wrong in it."""
    try:
        spec = msgspec.toml.decode(path.read_bytes(), type=ClusterSpec)
    except (OSError, UnicodeError, msgspec.DecodeError) as error:
        raise BadInputError(f"{path}: {error}") from None
    for place, fault in _faults(spec):
        raise BadInputError(f"{path}: {fault} - at `$.{place}`")
    return spec


def check_model(spec: ClusterSpec, model: ModelFacts) -> None:
    """Raises BadInputError if a stage of the model has no host, or a host has another stage."""
    served = {stage for group in spec.hosts for stage in group.stages}
    if missing := [stage for stage in model.stages if stage not in served]:
        raise BadInputError(
            f"no hosts have the model's {missing[0]}: name it in `$.hosts[].stages`"
        )
    if unknown := sorted(served - set(model.stages)):
        raise BadInputError(f"`$.hosts[].stages`: this model has no {unknown[0]}")


def _faults(spec: ClusterSpec) -> Iterable[tuple[str, str]]:
    """Place and fault of what is well-formed and wrong."""
    names = Counter(group.name for group in spec.hosts)
    if not spec.hosts:
        yield "hosts", "there are none"
    if wrong := [zone for zone, n in Counter(spec.zones).items() if n > 1 or not zone]:
        yield "zones", f"{wrong[0]!r} is empty, or there twice"
    if not spec.drain_s >= 0:
        yield "drain_s", f"{spec.drain_s} is no time"
    if spec.stage_key_file and not Path(spec.stage_key_file).is_absolute():
        yield "stage_key_file", "name it from / on, as on every machine"
    yield from _flag_faults("flags", spec.flags)
    for at, group in enumerate(spec.hosts):
        place = f"hosts[{at}]"
        if not _NAME.fullmatch(group.name) or group.name == GATEWAYS:
            yield f"{place}.name", f"{group.name!r} is no name of hosts"
        elif names[group.name] > 1:
            yield f"{place}.name", f"{group.name!r} is there twice"
        if unknown := [stage for stage in group.stages if stage not in STAGES]:
            yield f"{place}.stages", f"no stage is called {unknown[0]!r}"
            continue
        if not group.stages or len(set(group.stages)) < len(group.stages):
            yield f"{place}.stages", "a host has some stages, each once"
        yield from _number_faults(place, group)
        if group.gpus < 0:
            yield f"{place}.gpus", f"{group.gpus} is no number of GPUs"
        if group.scaling is not None:
            yield from _scaling_faults(f"{place}.scaling", group, group.scaling)
        yield from _flag_faults(f"{place}.flags", group.flags)
        yield from _config_faults(f"{place}.flags", spec, group)
    yield from _number_faults(GATEWAYS, spec.gateways)
    yield from _flag_faults(f"{GATEWAYS}.flags", spec.gateways.flags)
    yield from _config_faults(f"{GATEWAYS}.flags", spec, spec.gateways)
    if any(group.scaling for group in spec.hosts) and not store_of(spec):
        yield (
            f"{GATEWAYS}.flags",
            "without --shared-limits nothing tells how many calls there are",
        )


def _number_faults(place: str, group: HostGroup | GatewayGroup) -> Iterable[tuple[str, str]]:
    if group.count < 1:
        yield f"{place}.count", f"{group.count} is too few: remove the group instead"
    if group.spare < 0:
        yield f"{place}.spare", f"{group.spare} is no number"
    if not group.cpus > 0:
        yield f"{place}.cpus", f"{group.cpus} is no number of cores"


def _scaling_faults(
    place: str, group: HostGroup, scaling: HostScaling
) -> Iterable[tuple[str, str]]:
    if scaling.sessions < 1:
        yield f"{place}.sessions", f"{scaling.sessions} is no number of sessions"
    if scaling.most < group.count:
        yield f"{place}.most", f"{scaling.most} is less than their count, {group.count}"
    if not 0 <= scaling.cold_start_s < math.inf:
        yield f"{place}.cold_start_s", f"{scaling.cold_start_s} is no time"


def store_of(spec: ClusterSpec) -> str:
    """URL of the store in which gateways report. "": they do not."""
    argv = [*spec.argv(spec.gateways), "--directory", "stages.json"]
    return parsed(argv).limits.shared_limits or ""


def _flag_faults(place: str, flags: list[str]) -> Iterable[tuple[str, str]]:
    for flag in flags:
        if flag.partition("=")[0] in _OWN_FLAGS:
            yield place, f"{flag.partition('=')[0]} is not for flags: the cluster sets it"


def _config_faults(
    place: str, spec: ClusterSpec, group: HostGroup | GatewayGroup
) -> Iterable[tuple[str, str]]:
    of_gateway = [] if isinstance(group, HostGroup) else ["--directory", "stages.json"]
    try:
        config = parsed([*spec.argv(group), *of_gateway])
    except BadInputError as error:
        yield place, str(error)
        return
    if not isinstance(group, HostGroup):
        return
    if connected := [name for name, stage in config.stages.items() if stage.connect]:
        yield place, f"--{connected[0]}.connect: the cluster finds the stages"
    used = _devices(config, group.stages)
    is_named = any(config.stages[stage].names_devices for stage in group.stages)
    if (group.gpus or is_named) and len(used) != group.gpus:
        listed = ", ".join(sorted(used)) or "no GPU"
        yield place, f"its stages use {listed}, and the host has {group.gpus} GPUs"


def parsed(argv: list[str]) -> ServerConfig:
    """Raises BadInputError for what launch_server does not accept."""
    try:
        return parse(argv)
    except SystemExit:  # argparse has printed why
        raise BadInputError("launch_server does not accept these flags") from None


def _devices(config: ServerConfig, stages: Iterable[str]) -> set[str]:
    """Devices of these stages that are no CPU."""
    found: set[str] = set()
    for name in stages:
        stage = config.stages[name]
        for device in stage.devices:
            found |= set(devices_of_ranks(device, stage.args))
    return found - {"cpu"}
