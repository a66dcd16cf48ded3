"""Seeded sampling on a CPU without sgl-kernel."""

TARGET = "sglang.srt.layers.sampler.murmur_hash32"
KIND = "replace"
SIGNATURE = "(seed, positions, col_indices)"
WHY = "upstream's CPU version is a kernel of sgl-kernel, which is absent here"
DROP_WHEN = "upstream has a version in PyTorch"
STAGES = ("piece_talker",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform.cpu_seeds:murmur_hash32"
