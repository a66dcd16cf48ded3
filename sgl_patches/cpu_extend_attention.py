"""Attention of a prefill chunk on a CPU, for the rows of the chunk alone."""

TARGET = (
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    "._run_sdpa_forward_extend"
)
KIND = "around"
SIGNATURE = (
    "(self, query: 'torch.Tensor', output: 'torch.Tensor', k_cache: 'torch.Tensor', "
    "v_cache: 'torch.Tensor', req_to_token: 'torch.Tensor', req_pool_indices: 'torch.Tensor', "
    "seq_lens: 'torch.Tensor', extend_prefix_lens: 'torch.Tensor', "
    "extend_seq_lens: 'torch.Tensor', encoder_lens: 'Optional[torch.Tensor]' = None, "
    "scaling=None, enable_gqa=False, causal=False, is_cross_attn=False, "
    "sliding_window_size: 'Optional[int]' = None)"
)
WHY = "upstream computes all earlier positions again: a chunk's cost is quadratic in its context"
DROP_WHEN = "upstream's torch_native backend computes the new positions only"
STAGES = ("*",)
CPU_ONLY = True
HOOK = "sglang_live.bridge.platform.cpu_attention:own_rows"
