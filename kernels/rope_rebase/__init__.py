"""Move cached keys to earlier positions, so that an endless session stays in the RoPE table."""

from sglang_live.kernels.rope_rebase.kernel import rebase_keys

__all__ = ["rebase_keys"]
