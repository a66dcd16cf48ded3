"""Sessions of equal length with their KV in torch, bounded as the engine bounds them.

In: token ids, and an Arm. Out: logits. kv/retention.py decides which tokens are dropped, and
kernels/rope_rebase moves the keys behind the sink, as bridge/session/compact.py does for a model
without M-RoPE. transformers computes.
"""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_live.kernels.rope_rebase import rebase_keys
from sglang_live.kv.retention import compaction_of

How = Literal["all", "window", "again"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """
    how: "all" keeps everything; "window" drops what is between sink and window, with its KV;
        "again" drops the same tokens and computes the others again, as an application does that
        leaves out the oldest turns of its next request.
    sink_tokens: kept at the beginning.
    window_tokens: kept at the end.
    """

    name: str
    how: How = "all"
    sink_tokens: int = 0
    window_tokens: int = 0

    @property
    def slack_tokens(self) -> int:
        """An eighth of the window, as by default; half of it where dropping costs a prefill."""
        return self.window_tokens // (2 if self.how == "again" else 8)


class HeldSessions:
    """
    Args:
        model: a Llama of transformers.
        page_size: of the engine's KV pool, in tokens.
    Attributes:
        n_computed: tokens that were computed, once more included.
    """

    def __init__(self, model: Any, arm: Arm, page_size: int = 1):
        self._model, self._arm, self._page_size = model, arm, page_size
        self._kv = DynamicCache()
        self._ids: Tensor | None = None
        self.n_computed = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that a session keeps now."""
        return 0 if self._ids is None else self._ids.shape[1]

    @torch.no_grad()
    def append(self, ids: Tensor, n_logits: int = 0) -> Tensor:
        """Compute further tokens.

        Args:
            ids: [n_sessions, n], int64.
            n_logits: of the last tokens; 0: of all.
        Returns:
            [n_sessions, n_logits, vocabulary]: the logits behind each token.
        """
        self._ids = ids if self._ids is None else torch.cat([self._ids, ids], dim=1)
        return self._compute(ids, n_logits)

    def end_turn(self) -> None:
        """Compact, if the window is exceeded by the slack."""
        arm = self._arm
        if arm.how == "all" or self._ids is None:
            return
        dropped = compaction_of(
            n_tokens=self.n_tokens,
            sink_tokens=arm.sink_tokens,
            window_tokens=arm.window_tokens,
            page_size=self._page_size,
            owned_from=0,
            media=(),
            slack_tokens=arm.slack_tokens,
        )
        if dropped is None:
            return
        begin, end = dropped.begin, dropped.end
        self._ids = torch.cat([self._ids[:, :begin], self._ids[:, end:]], dim=1)
        if arm.how == "again":
            self._kv = DynamicCache()
            self._compute(self._ids, n_logits=1)
        else:
            self._drop(begin, end)

    def branch(self) -> "HeldSessions":
        """Sessions that go on from here; these stay as they are."""
        other = copy.copy(self)
        other._kv = copy.deepcopy(self._kv)
        return other

    @torch.no_grad()
    def _compute(self, ids: Tensor, n_logits: int = 0) -> Tensor:
        self.n_computed += ids.numel()
        made = self._model(ids, past_key_values=self._kv, use_cache=True, logits_to_keep=n_logits)
        logits: Tensor = made.logits
        return logits

    def _drop(self, begin: int, end: int) -> None:
        config = self._model.config
        inv_freq = self._model.model.rotary_emb.inv_freq.float()
        for layer in self._kv.layers:
            keys, values = (
                torch.cat([kv[:, :, :begin], kv[:, :, end:]], dim=2)
                for kv in (layer.keys, layer.values)
            )
            rows = torch.arange(begin, keys.shape[2])
            for session in keys:
                rebase_keys(
                    session.transpose(0, 1),
                    rows,
                    end - begin,
                    inv_freq,
                    neox=True,
                    rotary_dim=config.head_dim,
                )
            layer.keys, layer.values = keys, values
