"""Moshi restated in PyTorch, one call at a time, without caches.

Source: LMGen of moshi 0.2.13, and of NVIDIA/personaplex, which begins with a prompt.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.moshi.voices import SILENCE, SINE
from test.moshi import checkpoint as tiny

_EPS = 1e-8


def _norm(x: Tensor, alpha: Tensor) -> Tensor:
    return x * alpha.flatten() * torch.rsqrt(_EPS + x.square().mean(-1, keepdim=True))


def _gated(x: Tensor, inner: Tensor, out: Tensor) -> Tensor:
    gate, up = F.linear(x, inner).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, out)


class Reference:
    """
    weights: by the published names.
    """

    def __init__(self, weights: dict[str, Tensor]):
        self.w, self.c = weights, tiny.CONFIG
        self.n = tiny.N_CODES
        self.card = len(weights["emb.0.weight"]) - 1

    def embed(self, text: int, codes: Sequence[int]) -> Tensor:
        """One position's input, of a text token and all codes."""
        streams = [self.w[f"emb.{n}.weight"][code] for n, code in enumerate(codes)]
        return torch.stack([*streams, self.w["text_emb.weight"][text]]).sum(0)

    @torch.no_grad()
    def call(
        self,
        heard: Tensor,
        *,
        prompt: Tensor | None = None,
        before: Sequence[int] | None = None,
        visible=lambda query, key: key <= query,
    ) -> list[list[int]]:
        """Text token and codes of each frame, the likeliest ones: one behind the prompt, and one
        behind each frame of the user.

        Args:
            heard: [n_frames, n_codes].
            prompt: [n, dim] inputs before the first frame. None: the beginning, as Moshi has it.
            before: codes that the delayed streams have at the first frame, its own of which the
                frame before has already. None: as Moshi has it.
            visible: which positions (tensors) a position attends to.
        """
        n, card = self.n, self.card
        begun = [card] * (2 * n) if before is None else list(before)
        x = self.embed(tiny.TEXT, [card] * (2 * n))[None] if prompt is None else prompt
        frames: list[list[int]] = []
        forced = None if before is None else begun[:n]
        state = _State(self, visible)
        frames.append(self._drawn(state.next(x)[-1], forced))
        delays = self.c["delays"][1:]
        for at, user in enumerate(heard.tolist()):
            codes = [*frames[-1][1:], *user]
            for k, delay in enumerate(delays):
                if delay and at == 0:
                    codes[k] = begun[k]
                elif delay and k >= n:
                    codes[k] = int(heard[at - 1, k - n])
            hidden = state.next(self.embed(frames[-1][0], codes)[None])[-1]
            frames.append(self._drawn(hidden, None))
        return frames

    def _drawn(self, hidden: Tensor, forced: list[int] | None) -> list[int]:
        text = int(F.linear(hidden, self.w["text_linear.weight"]).argmax())
        return [text, *self._codes(hidden, text, forced)]

    def _codes(self, hidden: Tensor, text: int, forced: list[int] | None) -> list[int]:
        w, own, heads = self.w, self.c["depformer_dim"], self.c["depformer_num_heads"]
        n_layers = self.c["depformer_num_layers"]
        before = w["depformer_text_emb.weight"][text]
        keys: list[list[Tensor]] = [[] for _ in range(n_layers)]
        values: list[list[Tensor]] = [[] for _ in range(n_layers)]
        codes: list[int] = []
        for step in range(self.n):
            x = F.linear(hidden, w[f"depformer_in.{step}.weight"]) + before
            for at in range(n_layers):
                name = f"depformer.layers.{at}."
                qkv_weight = w[name + "self_attn.in_proj_weight"][3 * own * step :][: 3 * own]
                out = w[name + "self_attn.out_proj.weight"][own * step :][:own]
                q, k, v = F.linear(_norm(x, w[name + "norm1.alpha"]), qkv_weight).view(3, heads, -1)
                keys[at].append(k)
                values[at].append(v)
                all_keys, all_values = torch.stack(keys[at], 1), torch.stack(values[at], 1)
                mixed = F.scaled_dot_product_attention(q.unsqueeze(1), all_keys, all_values)
                x = x + F.linear(mixed.flatten(), out)
                gate = f"{name}gating.{step}.linear_"
                normed = _norm(x, w[name + "norm2.alpha"])
                x = x + _gated(normed, w[gate + "in.weight"], w[gate + "out.weight"])
            code = int(F.linear(x, w[f"linears.{step}.weight"]).argmax())
            if forced is not None and self.c["delays"][1 + step]:
                code = forced[step]
            codes.append(code)
            if step + 1 < self.n:
                before = w[f"depformer_emb.{step}.weight"][code]
        return codes


class _State:
    """Keys and values of all positions so far, by layer."""

    def __init__(self, reference: Reference, visible):
        self._w, self._c, self._visible = reference.w, reference.c, visible
        self._kv: list[tuple[Tensor, Tensor] | None] = [None] * reference.c["num_layers"]
        self._n = 0

    def next(self, x: Tensor) -> Tensor:
        """Normalised states [n, dim] of the next n positions."""
        heads, at = self._c["num_heads"], self._n + torch.arange(len(x))
        self._n += len(x)
        mask = self._visible(at[:, None], torch.arange(self._n)[None])
        for n in range(self._c["num_layers"]):
            name = f"transformer.layers.{n}."
            qkv = F.linear(
                _norm(x, self._w[name + "norm1.alpha"]), self._w[name + "self_attn.in_proj_weight"]
            )
            q, k, v = qkv.view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
            q, k = self._turned(q, at), self._turned(k, at)
            if (past := self._kv[n]) is not None:
                k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
            self._kv[n] = k, v
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            mixed = mixed.transpose(0, 1).flatten(1)
            x = x + F.linear(mixed, self._w[name + "self_attn.out_proj.weight"])
            gate = name + "gating.linear_"
            normed = _norm(x, self._w[name + "norm2.alpha"])
            x = x + _gated(normed, self._w[gate + "in.weight"], self._w[gate + "out.weight"])
        return _norm(x, self._w["out_norm.alpha"])

    def _turned(self, x: Tensor, at: Tensor) -> Tensor:
        """RoPE of adjacent numbers. x: [heads, n, head_dim]."""
        half = x.shape[-1] // 2
        exponent = torch.arange(half, dtype=torch.float64) / half
        angle = torch.outer(at.double(), self._c["max_period"] ** -exponent)
        turned = torch.view_as_complex(x.double().view(*x.shape[:-1], half, 2))
        turned = turned * torch.polar(torch.ones_like(angle), angle)
        return torch.view_as_real(turned).flatten(-2).float()


def prompt_of(
    reference: Reference, voice: dict[str, Tensor], role: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """PersonaPlex: inputs of a prompt, and the codes of its last frame."""
    n, rows = tiny.N_CODES, voice["embeddings"].flatten(0, -2)
    silent = [*SILENCE[:n], *SINE[:n]]
    last, delayed = (voice["cache"][0, :, (len(rows) + k) % 4].tolist() for k in (0, 1))
    delays = reference.c["delays"][1:]
    mixed = [
        old if delay else new for old, new, delay in zip(delayed[1:], silent, delays, strict=True)
    ]
    texts = [3] * 5 + ([*role] + [3] * 6 if role else [])
    embeds = [reference.embed(last[0], last[1:]), reference.embed(3, mixed)]
    embeds += [reference.embed(text, silent) for text in texts]
    return torch.cat((rows, torch.stack(embeds))), silent
