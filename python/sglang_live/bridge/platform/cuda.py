"""SGLang's platform for an NVIDIA GPU on a machine without sgl-kernel and FlashInfer.

SGLang's own CUDA path imports both packages at module level wherever `is_cuda()` is true. Here
`is_cuda()` is false, so that SGLang takes the paths that run on any device: native PyTorch
operators, and Triton for attention and allocation. Streams, pinned memory, bf16 and decode graphs
are CUDA's own. docs/deploy.md lists what replaces what.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch

# "1": use this platform on any CUDA device. "0": never. Unset: where sgl-kernel is missing.
NATIVE_ENV = "SGLANG_LIVE_CUDA_NATIVE"
# Key of this platform's own forwards in SGLang's fused operators.
DISPATCH_KEY = "sglang_live_cuda"

_DEFINED_IN = ("sglang.srt.utils.common", "sglang.srt.utils")


def is_active() -> bool:
    """
    Raises:
        ValueError: the environment variable has another value than 0 or 1.
    """
    wanted = os.environ.get(NATIVE_ENV, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{NATIVE_ENV} is {wanted!r}: set it to 0 or 1, or unset it")
    if wanted == "0" or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return wanted == "1" or importlib.util.find_spec("sgl_kernel") is None


def activate() -> str | None:
    """Entry point of group `sglang.srt.platforms`. Returns None without a GPU or with sgl-kernel.

    SGLang calls it while it imports its first modules, before any of them asks `is_cuda()`.
    """
    if not is_active():
        return None
    # Defaults to on where is_cuda() is true: without it, the scheduler writes into tables that
    # the forward on the other stream still reads.
    os.environ.setdefault("SGLANG_ENABLE_WAR_BARRIER", "1")
    sys.meta_path.insert(0, _UntilCommonIsThere())
    return f"{__name__}.CudaNativePlatform"


class _UntilCommonIsThere(MetaPathFinder):
    """Replaces `is_cuda` as soon as its module defines it. Finds no module.

    The module is being imported when the platform is chosen, so that its definition would
    overwrite a value set at that time. Every import of a further module passes here. The package
    around it copies its names before it imports the next one.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        modules = [sys.modules[name] for name in _DEFINED_IN if name in sys.modules]
        defined = [module for module in modules if hasattr(module, "is_cuda")]
        for module in defined:
            hide_cuda(module)
        if len(defined) == len(_DEFINED_IN):
            sys.meta_path.remove(self)
        return None


def hide_cuda(module: ModuleType) -> None:
    """Have SGLang's `is_cuda()` say no, and `is_cuda_alike()` yes: torch.cuda is there."""
    module.is_cuda = _no  # type: ignore[attr-defined] # upstream's own
    module.is_cuda_alike = _yes  # type: ignore[attr-defined] # upstream's own


def _no() -> bool:
    return False


def _yes() -> bool:
    return True


# Upstream's functions are cached; SGLang's tests alone clear the cache.
_no.cache_clear = _yes.cache_clear = lambda: None  # type: ignore[attr-defined] # upstream's own


def check_hidden() -> None:
    """
    Raises:
        RuntimeError: a module of SGLang asked `is_cuda()` before it was replaced.
    """
    believers = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.startswith("sglang.") and getattr(module, "_is_cuda", False) is True
    )
    if believers:
        raise RuntimeError(
            f"{', '.join(believers)} would import sgl-kernel: SGLang was imported before its "
            "platform was chosen"
        )


def __getattr__(name: str) -> type:
    # The class is built on first use: the discovery of platforms must not import the engine.
    if name != "CudaNativePlatform":
        raise AttributeError(name)
    platform = _platform_class()
    globals()[name] = platform
    return platform


def _platform_class() -> type:
    from sglang.srt.platforms.cuda import CudaDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CudaNativePlatform(CudaDeviceMixin, SRTPlatform):
        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities(
            supports_triton=True, graph_capture=True, supports_pynccl=True
        )

        def apply_server_args_defaults(self, server_args: Any) -> None:
            # FlashInfer's sampler and sgl-kernel's all-reduce are SGLang's defaults on CUDA.
            if server_args.sampling_backend is None:
                server_args.sampling_backend = "pytorch"
            server_args.disable_custom_all_reduce = True

        def get_default_attention_backend(self) -> str:
            return "triton"

        def get_graph_runner_cls(self) -> type:
            from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

            return DecodeCudaGraphRunner

        def get_group_coordinator_device(self, local_rank: int) -> torch.device:
            return torch.device("cuda", local_rank)

        def get_dispatch_key_name(self) -> str:
            return DISPATCH_KEY

        def init_backend(self) -> None:
            from sglang_live.bridge.platform import native_moe, native_norms

            check_hidden()
            native_moe.register(DISPATCH_KEY)
            native_norms.register(DISPATCH_KEY)

        def get_torch_profiler_activity_str(self) -> str:
            return "GPU"

        def get_torch_profiler_activity(self) -> Any:
            return torch.profiler.ProfilerActivity.CUDA

    return CudaNativePlatform
