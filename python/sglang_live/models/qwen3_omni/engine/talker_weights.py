"""Loads the published checkpoint's weights into the talker model; every name must match."""

import re
from collections import Counter
from collections.abc import Iterable

from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from sglang_live.models.qwen3_omni.code_predictor import CodePredictor
from sglang_live.models.qwen3_omni.stage_view import THINKER_EMBEDDING

_RENAMED = (
    ("model.codec_embedding.", "model.embed_tokens."),
    ("shared_expert_gate.", "shared_gate."),
    ("shared_expert.down_proj.", "shared_down."),
)
# checkpoint part -> (parameter, shard id) of SGLang's stacked linear layers
_STACKED = (
    ("self_attn.q_proj", "self_attn.qkv_proj", "q"),
    ("self_attn.k_proj", "self_attn.qkv_proj", "k"),
    ("self_attn.v_proj", "self_attn.qkv_proj", "v"),
    ("shared_expert.gate_proj", "shared_gate_up", 0),
    ("shared_expert.up_proj", "shared_gate_up", 1),
)
_PER_STEP = re.compile(r"code_predictor\.(?:model\.)?(codec_embedding|lm_head)\.(\d+)\.weight")


def load_talker_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Fill every parameter of `model` from `talker.*` weights.

    Returns:
        the thinker's embedding table [thinker_vocab, thinker_hidden].
    Raises:
        ValueError: names the weights that are unknown or missing.
    """
    params = dict(model.named_parameters())
    experts = FusedMoE.make_expert_params_mapping(
        ckpt_gate_proj_name="gate_proj",
        ckpt_down_proj_name="down_proj",
        ckpt_up_proj_name="up_proj",
        num_experts=model.config.num_experts,
    )
    n_loaded: Counter[str] = Counter()
    embedding = None
    for full_name, tensor in weights:
        if full_name == THINKER_EMBEDDING:
            embedding = tensor
        elif full_name.startswith("talker."):
            name = full_name.removeprefix("talker.")
            target = _load(model, params, experts, name, tensor)
            if target not in params:
                raise ValueError(f"unknown talker weight {full_name}")
            n_loaded[target] += 1
    lacking = [name for name in params if n_loaded[name] != _n_parts(model, name)]
    if embedding is None:
        lacking.append(THINKER_EMBEDDING)
    if lacking:
        raise ValueError(f"checkpoint lacks talker weights: {lacking[:8]}")
    return embedding


def _n_parts(model: nn.Module, name: str) -> int:
    """How many weights of the checkpoint make up one parameter."""
    if name in ("code_predictor.codec_embedding", "code_predictor.lm_head"):
        return model.code_predictor.n_steps
    for stacked, n in (("qkv_proj", 3), ("gate_up", 2)):
        if stacked in name:
            return n
    for stacked, n in (("experts.w13", 2), ("experts.w2", 1)):
        if stacked in name:
            return n * model.config.num_experts
    return 1


def _load(model, params: dict, experts: list, name: str, tensor: Tensor) -> str:
    """Copy one tensor into its parameter. Returns the parameter's name."""
    if name.startswith("code_predictor."):
        return load_predictor_weight(model.code_predictor, params, name, tensor)
    for found, stacked, shard in _STACKED:
        if found in name:
            target = name.replace(found, stacked)
            if target in params:
                params[target].weight_loader(params[target], tensor, shard)
            return target
    if ".mlp.experts." in name:
        for param, found, expert, shard in experts:
            if found in name:
                target = name.replace(found, param)
                loader = params[target].weight_loader
                loader(params[target], tensor, target, shard_id=shard, expert_id=expert)
                return target
        return name
    for old, new in _RENAMED:
        name = name.replace(old, new)
    if name in params:
        loader = getattr(params[name], "weight_loader", default_weight_loader)
        loader(params[name], tensor)
    return name


def load_predictor_weight(
    predictor: CodePredictor, params: dict[str, Tensor], name: str, tensor: Tensor
) -> str:
    """As _load, for the code predictor: q, k, v and gate, up are row ranges of one matrix.

    Args:
        params: the parameters of `predictor`, each as `code_predictor.NAME`.
    """
    if match := _PER_STEP.fullmatch(name):
        target = f"code_predictor.{match[1]}"
        params[target].data[int(match[2])].copy_(tensor)
        return target
    target = name
    for part in ("model.", "self_attn.", "mlp."):
        target = target.replace(part, "")
    layer = predictor.layers[0]
    n_q, n_kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    starts = {
        ".q_proj.": (".qkv_proj.", 0),
        ".k_proj.": (".qkv_proj.", n_q),
        ".v_proj.": (".qkv_proj.", n_q + n_kv),
        ".gate_proj.": (".gate_up_proj.", 0),
        ".up_proj.": (".gate_up_proj.", len(tensor)),
    }
    begin = 0
    for part, (stacked, row) in starts.items():
        if part in target:
            target, begin = target.replace(part, stacked), row
            break
    if target in params:
        params[target].data[begin : begin + len(tensor)].copy_(tensor)
    return target
