"""Reference attention that can be captured."""

TARGET = "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS"
KIND = "item"
SIGNATURE = None
WHY = "torch_native attention reads sequence lengths on the host and cannot be captured"
DROP_WHEN = "upstream's torch_native attention can be captured"
STAGES = ("*",)
CPU_ONLY = True
WITH_GRAPHS = True


def _attention(model_runner):
    from sglang_live.bridge.platform.cpu_graph import TapeAttention

    return TapeAttention(model_runner)


HOOK = ("torch_native", _attention)
