"""Seams: the places where sglang_live hooks into SGLang, each verified before serving.

A seam is one module of sgl_patches/. SGLang itself only logs a hook that fails and serves its
stock behaviour; here a process in which a hook is not in place exits instead, and names the seam.

A seam module declares
    TARGET     dotted path of the function, method, class or container entry
    KIND       "replace" | "around" | "before" | "after" | "item" | "define" (set a name that is
               absent upstream, or a kernel there: SGLang's hooks wrap functions only)
    SIGNATURE  str(inspect.signature(target)) expected upstream; None for "define" and "item"
    HOOK       what to install: an object, "module:name" (imported only where the seam is
               needed), or (key, value) for "item"
    WHY, DROP_WHEN   one sentence each
    STAGES     names of the stages that need it, or ("*",); PIECE_TALKER is a talker that SGLang
               serves by itself
    CPU_ONLY   True for shims of the CPU reference platform
    CUDA_NATIVE  True for one that CUDA without sgl-kernel needs, too
    WITH_POLICIES  True if only policies need it: with the policies off it is not installed
"""

import importlib
import inspect
import os
import pkgutil
import sys
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

from sglang_live.attachment import attach
from sglang_live.bridge.platform import cpu, cuda
from sglang_live.engine_channel.inbox import policies_from_env
from sglang_live.errors import SeamError
from sglang_live.policy.policies import OFF, Policies

PIECE_TALKER = "piece_talker"
# Exit status of a process whose hooks are not in place (EX_CONFIG of sysexits.h).
EXIT_BAD_SEAM = 78

# "cuda_native": without sgl-kernel (bridge/platform/cuda.py).
Platform = Literal["cpu", "cuda", "cuda_native"]


@dataclass(frozen=True, slots=True)
class Seam:
    name: str
    target: str
    kind: str
    signature: str | None
    hook: Any
    why: str
    drop_when: str
    stages: tuple[str, ...]
    cpu_only: bool
    with_policies: bool = False
    cuda_native: bool = False

    @staticmethod
    def of(module: ModuleType) -> "Seam":
        return Seam(
            name=module.__name__.rsplit(".", 1)[1],
            target=module.TARGET,
            kind=module.KIND,
            signature=module.SIGNATURE,
            hook=module.HOOK,
            why=module.WHY,
            drop_when=module.DROP_WHEN,
            stages=module.STAGES,
            cpu_only=module.CPU_ONLY,
            with_policies=getattr(module, "WITH_POLICIES", False),
            cuda_native=getattr(module, "CUDA_NATIVE", False),
        )

    def needed(
        self,
        stage: str | None,
        platform: Platform,
        policies: Policies = OFF,
    ) -> bool:
        if not self.fits(platform) or (self.with_policies and not policies):
            return False
        return "*" in self.stages or stage in self.stages

    def fits(self, platform: Platform) -> bool:
        if not self.cpu_only:
            return True
        return platform == "cpu" or (self.cuda_native and platform == "cuda_native")


def all_seams() -> list[Seam]:
    package = importlib.import_module("sglang_live.sgl_patches")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
    return [Seam.of(importlib.import_module(f"{package.__name__}.{n}")) for n in names]


def needed_seams(stage: str | None) -> list[Seam]:
    """The seams of this process. Outside a stage only the platforms' shims apply."""
    platform = active_platform()
    if stage is None:
        return [seam for seam in all_seams() if seam.cpu_only and seam.needed(None, platform)]
    policies = policies_from_env()
    return [s for s in all_seams() if s.needed(stage, platform, policies)]


def active_platform() -> Platform:
    if cpu.is_active():
        return "cpu"
    return "cuda_native" if cuda.is_active() else "cuda"


def upstream_signature(seam: Seam) -> str | None:
    """The signature of the target in the installed SGLang, None for kinds without one.

    Raises:
        SeamError: the target does not exist.
    """
    owner, attr = _resolve(seam)
    if seam.kind in ("define", "item"):
        return None
    if not hasattr(owner, attr):
        raise SeamError(f"seam {seam.name}: {seam.target} does not exist in this SGLang")
    return str(inspect.signature(getattr(owner, attr)))


def install(stage: str | None) -> list[Seam]:
    """Install every seam that this process needs, see put_in_place()."""
    seams = needed_seams(stage)
    put_in_place(seams)
    return seams


def put_in_place(found: list[Seam]) -> None:
    """Check, install and verify seams.

    Raises:
        SeamError: names the seam that failed; the process must stop.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = [_with_hook(seam) for seam in found]
    for seam in seams:
        signature = upstream_signature(seam)
        if signature != seam.signature:
            raise SeamError(
                f"seam {seam.name}: {seam.target} has signature {signature}, "
                f"expected {seam.signature}"
            )
    for seam in seams:
        owner, attr = _resolve(seam)
        if seam.kind == "item":
            key, value = seam.hook
            getattr(owner, attr)[key] = value
        elif seam.kind == "define":
            setattr(owner, attr, seam.hook)
        else:
            HookRegistry.register(seam.target, seam.hook, HookType(seam.kind))
    HookRegistry.apply_hooks()
    for seam in seams:
        if not _landed(seam):
            raise SeamError(f"seam {seam.name}: hook on {seam.target} did not land")


def check_landed(stage: str | None) -> None:
    """Raises SeamError if a seam that this process needs is not in place."""
    for seam in needed_seams(stage):
        if not _landed(_with_hook(seam)):
            raise SeamError(f"seam {seam.name}: hook on {seam.target} did not land")


def install_or_exit(stage: str | None) -> None:
    """As install(), with what is attached. SGLang swallows a plugin's exceptions: exit instead."""
    try:
        install(stage)
        attach("sglang")
    except Exception as error:
        print(f"sglang_live refuses to start: {error!r}", file=sys.stderr, flush=True)
        os._exit(EXIT_BAD_SEAM)


def _with_hook(seam: Seam) -> Seam:
    if not isinstance(seam.hook, str):
        return seam
    return replace(seam, hook=pkgutil.resolve_name(seam.hook))


def _resolve(seam: Seam) -> tuple[Any, str]:
    path, attr = seam.target.rsplit(".", 1)
    try:
        return pkgutil.resolve_name(path), attr
    except (ImportError, AttributeError) as error:
        raise SeamError(f"seam {seam.name}: {path} does not exist in this SGLang") from error


def _landed(seam: Seam) -> bool:
    from sglang.srt.plugins.hook_registry import HookRegistry

    owner, attr = _resolve(seam)
    current = getattr(owner, attr, None)
    if seam.kind == "item":
        key, value = seam.hook
        return current is not None and current.get(key) is value
    if seam.kind == "define" or isinstance(seam.hook, type):
        return current is seam.hook
    return seam.target in HookRegistry._patched
