"""Calls without end: the keys of a session's window move back before positions run out.

After a cut nobody is left at the positions behind the sink. A rebase closes that gap: the window's
keys are rotated to the positions right behind it, and the table of positions follows. Distances
within the window stay, those to the sink become what they would be in a shorter conversation.
Source: StreamingLLM, arXiv 2309.17453, which has such positions always.
"""

from sglang.srt.managers.schedule_batch import MultimodalInputs
from torch import Tensor, nn

from sglang_live.bridge.session.media import position_gap, shift_positions
from sglang_live.kernels.rope_rebase import rebase_keys
from sglang_live.kv.retention import REBASE_RESERVE_TOKENS, rebase_due


class Rebase:
    """
    Args:
        model: whose layers share one rotary embedding.
        kv: SGLang's pool of one device.
        limit: positions that the model was made for.
    Raises:
        ValueError: the model's keys cannot be rotated in place.
    """

    def __init__(self, model: nn.Module, kv, limit: int):
        ropes = [m for m in model.modules() if hasattr(m, "cos_sin_cache")]
        if not ropes or not hasattr(ropes[0], "base"):
            raise ValueError("endless sessions need a rotary embedding with a base")
        self._rope, self._kv, self._limit = ropes[0], kv, limit
        self._reserve = min(REBASE_RESERVE_TOKENS, limit // 4)

    def due(self, mm_inputs: MultimodalInputs, sink_tokens: int) -> bool:
        gap = position_gap(mm_inputs, sink_tokens)
        n_taken = int(mm_inputs.mrope_positions.max()) + 1 - gap
        return rebase_due(gap, n_taken, self._limit, self._reserve)

    def rebase(
        self, mm_inputs: MultimodalInputs, sink_tokens: int, rows: Tensor
    ) -> MultimodalInputs:
        """The positions from now on. rows: [n] KV slots of all tokens behind the sink."""
        gap = position_gap(mm_inputs, sink_tokens)
        rope, kv = self._rope, self._kv
        inv_freq = rope._compute_inv_freq(rope.base).float().to(rows.device)
        for layer in range(kv.start_layer, kv.start_layer + kv.layer_num):
            rebase_keys(
                kv.get_key_buffer(layer),
                rows.long(),
                gap,
                inv_freq,
                neox=rope.is_neox_style,
                rotary_dim=rope.rotary_dim,
            )
        return shift_positions(mm_inputs, gap, sink_tokens=sink_tokens)
