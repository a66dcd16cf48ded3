"""torch.compile in an engine's process: until its graphs are captured, and not while it serves."""

from typing import Any

import torch


def end_compiling(result: Any, model_runner: Any, *_args: Any, **_options: Any) -> Any:
    """After ModelRunner.init_cuda_graphs: functions that are not compiled by then run as they are.

    SGLang has decorated some small ones, and first calls them in the middle of calls: with the
    first picture, the first repetition penalty or seed, and once more with the first two responses
    in one batch. On a CPU a C++ compiler then takes 15 s of a core.
    """
    if not model_runner.server_args.enable_torch_compile:
        torch.compiler.set_stance("eager_on_recompile")
    return result
