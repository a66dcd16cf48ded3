"""Names of a published Moshi's weights, and the parameters that they are."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """place: index of the part of the parameter. joined: the weight has such parts one after the
    other, and more of them, maybe; False: it is one of them."""

    place: int
    joined: bool = False


# What a weight fills: parameters, each whole or in part.
Places = list[tuple[str, Step | None]]

_BACKBONE = {
    "self_attn.in_proj_weight": "self_attn.qkv_proj.weight",
    "self_attn.in_projs.0.weight": "self_attn.qkv_proj.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.out_projs.0.weight": "self_attn.o_proj.weight",
    "gating.linear_in.weight": "mlp.gate_up_proj.weight",
    "gating.linear_out.weight": "mlp.down_proj.weight",
    "norm1.alpha": "input_layernorm.weight",
    "norm2.alpha": "post_attention_layernorm.weight",
}
_WHOLE = {
    "text_emb.weight": "model.embed_tokens.weight",
    "text_linear.weight": "text_head.weight",
    "out_norm.alpha": "model.norm.weight",
    "depformer_text_emb.weight": "depth.text_emb",
}
_BY_STEP = (
    (re.compile(r"emb\.(\d+)\.weight"), "code_emb"),
    (re.compile(r"depformer_in\.(\d+)\.weight"), "depth.inputs"),
    (re.compile(r"depformer_emb\.(\d+)\.weight"), "depth.emb"),
    (re.compile(r"linears\.(\d+)\.weight"), "depth.heads"),
)
_LAYER = re.compile(r"(transformer|depformer)\.layers\.(\d+)\.(.+)")
_DEPTH = re.compile(
    r"(?:self_attn\.(in_proj|out_proj)s\.(\d+)\.weight|gating\.(\d+)\.(linear_in|linear_out)\.weight)"
)
_DEPTH_PARTS = {"in_proj": "qkv", "out_proj": "out", "linear_in": "gate_up", "linear_out": "down"}
_JOINED = {"self_attn.in_proj_weight": "qkv", "self_attn.out_proj.weight": "out"}
_NORMS = {"norm1.alpha": "norm1", "norm2.alpha": "norm2"}


def places(name: str, n_codes: int) -> Places | None:
    """The parameters that a weight of this name fills; none for codes that are not drawn. None: it
    is no weight of Moshi.

    n_codes: that are drawn.
    """
    if name in _WHOLE:
        return [(_WHOLE[name], None)]
    for pattern, target in _BY_STEP:
        if match := pattern.fullmatch(name):
            most = {"code_emb": 2 * n_codes, "depth.emb": n_codes - 1}.get(target, n_codes)
            return _of_step(target, int(match[1]), most)
    if not (match := _LAYER.fullmatch(name)):
        return None
    part, layer, rest = match.groups()
    if part == "transformer":
        found = _BACKBONE.get(rest)
        return None if found is None else [(f"model.layers.{layer}.{found}", None)]
    base = f"depth.layers.{layer}."
    if rest in _NORMS:
        return [(base + _NORMS[rest], None)]
    if rest in _JOINED:
        return [(base + _JOINED[rest], Step(place, joined=True)) for place in range(n_codes)]
    if match := _DEPTH.fullmatch(rest):
        kind, step = match[1] or match[4], match[2] or match[3]
        return _of_step(base + _DEPTH_PARTS[kind], int(step), n_codes)
    return None


def _of_step(target: str, step: int, most: int) -> Places:
    return [(target, Step(step))] if step < most else []
