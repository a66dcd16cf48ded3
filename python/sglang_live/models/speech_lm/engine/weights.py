"""Loads a published checkpoint's weights into a talker model; every name must match."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from sglang_live.models.speech_lm.code_predictor import CodePredictor

_PER_STEP = re.compile(r"code_predictor\.(?:model\.)?(codec_embedding|lm_head)\.(\d+)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """How a checkpoint's names become those of the model's parameters.

    embedding: full name of the text embedding.
    renamed: parts of names, and what they become.
    stacked: part of a name, that of SGLang's stacked linear layer, and the shard's id in it; in
        addition to q, k and v.
    experts: as FusedMoE.make_expert_params_mapping returns them.
    """

    embedding: str
    renamed: tuple[tuple[str, str], ...]
    stacked: tuple[tuple[str, str, int], ...]
    experts: Sequence[tuple[str, str, int, str]] = ()


_QKV = tuple((f"self_attn.{x}_proj", "self_attn.qkv_proj", x) for x in "qkv")


def load_talker_weights(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], names: WeightNames
) -> Tensor:
    """Fill every parameter of `model` from `talker.*` weights.

    Returns:
        the text embedding [text_vocab, text_hidden].
    Raises:
        ValueError: names the weights that are unknown or missing.
    """
    params = dict(model.named_parameters())
    n_loaded: Counter[str] = Counter()
    embedding = None
    for full_name, tensor in weights:
        if full_name == names.embedding:
            embedding = tensor
        elif full_name.startswith("talker."):
            name = full_name.removeprefix("talker.")
            target = _load(model, params, names, name, tensor)
            if target not in params:
                raise ValueError(f"unknown talker weight {full_name}")
            n_loaded[target] += 1
    lacking = [name for name in params if n_loaded[name] != _n_parts(model, name)]
    if embedding is None:
        lacking.append(names.embedding)
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


def _load(model, params: dict, names: WeightNames, name: str, tensor: Tensor) -> str:
    """Copy one tensor into its parameter. Returns the parameter's name."""
    if name.startswith("code_predictor."):
        return load_predictor_weight(model.code_predictor, params, name, tensor)
    for found, stacked, shard in (*_QKV, *names.stacked):
        if found in name:
            target = name.replace(found, stacked)
            if target in params:
                params[target].weight_loader(params[target], tensor, shard)
            return target
    if ".mlp.experts." in name:
        for param, found, expert, shard in names.experts:
            if found in name:
                target = name.replace(found, param)
                loader = params[target].weight_loader
                loader(params[target], tensor, target, shard_id=shard, expert_id=expert)
                return target
        return name
    for old, new in names.renamed:
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


_STACKED = re.compile(r"\.(q|k|v|gate|up)_proj\.")
_SHARDS: dict[str, tuple[str, str | int]] = {
    **{part: ("qkv", part) for part in "qkv"},
    "gate": ("gate_up", 0),
    "up": ("gate_up", 1),
}


def load_llama_weight(params: dict[str, Tensor], name: str, tensor: Tensor) -> str:
    """Copy one tensor into its parameter, as SGLang's Llama stacks them. Returns its name."""
    shard: list[str | int] = []
    if match := _STACKED.search(name):
        stacked, part = _SHARDS[match[1]]
        name, shard = name.replace(match[0], f".{stacked}_proj."), [part]
    if name in params:
        loader = getattr(params[name], "weight_loader", default_weight_loader)
        loader(params[name], tensor, *shard)
    return name


def lacking(names: Iterable[str], loaded: Counter[str]) -> list[str]:
    """Parameters for which not all weights of load_llama_weight came."""
    parts = {"qkv_proj": 3, "gate_up_proj": 2}

    def wanted(name: str) -> int:
        return next((n for stacked, n in parts.items() if stacked in name), 1)

    return sorted(name for name in names if loaded[name] < wanted(name))
