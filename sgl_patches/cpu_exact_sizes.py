"""A model on the CPU has the sizes of its checkpoint, also with several ranks."""

TARGET = "sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp"
KIND = "replace"
SIGNATURE = (
    "(model_config: 'ModelConfig', load_config: 'LoadConfig', tp_size: 'int') -> 'ModelConfig'"
)
WHY = "upstream pads layers for kernels that are absent here, and the padding stays uninitialised"
DROP_WHEN = "upstream pads for its own kernels only"
STAGES = ("*",)
CPU_ONLY = True


def HOOK(model_config, load_config, tp_size):
    return model_config
