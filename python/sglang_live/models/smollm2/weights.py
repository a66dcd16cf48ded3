"""config.json and the weights of a Llama from its GGUF file.

llama.cpp rotates adjacent channels of a head, transformers and SGLang rotate channel i with
channel i + head_dim / 2. Its conversion therefore permutes the rows of q and k; that is undone.
"""

from typing import Any

import numpy as np
import torch

from sglang_live.models.smollm2.gguf_file import Floats, GgufFile

_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}
_FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        BadInputError: the model is not a plain Llama.
    """
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise file.error(f"the architecture is {architecture}, not llama")
    # Scaled rotations, experts and other variants have settings of their own.
    known = {f"llama.{name}" for name in (*_SIZES, *_FLOATS)}
    for key in file.keys_of("llama."):
        if key not in known:
            raise file.error(f"{key} is a setting of a model that is not converted")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {ours: file.value(f"llama.{theirs}", int) for theirs, ours in _SIZES.items()}
    for theirs, ours in _FLOATS.items():
        # The shortest decimal of the float32: 1e-05 and not 9.999999747378752e-06.
        config[ours] = float(str(np.float32(file.value(f"llama.{theirs}", float))))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if config["head_dim"] * heads != config["hidden_size"] or heads % kv_heads:
        raise file.error("the sizes of its attention heads do not fit together")
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensor_names(),
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": "bfloat16",
    }


def weights_of(file: GgufFile, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """bfloat16 weights by their names in transformers.

    Raises:
        BadInputError: a tensor is missing, or has another shape, or is not of this model.
    """
    names = _names(config)
    weights: dict[str, torch.Tensor] = {}
    for name, values in file.tensors():
        if name not in names:
            raise file.error(f"{name} is not a tensor of this model")
        target, shape = names.pop(name)
        if values.shape != shape:
            raise file.error(f"{name} has the shape {values.shape} instead of {shape}")
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            values = unpermute(values, config["head_dim"])
        weights[target] = torch.from_numpy(values).to(torch.bfloat16)
    if names:
        raise file.error(f"{len(names)} tensors are missing, {next(iter(names))} among them")
    return weights


def unpermute(values: Floats, head_dim: int) -> Floats:
    """Order rows [n_heads * head_dim, n_in] of q or k as transformers does.

    Within a head, rows 0, 2, 4, … come first, then rows 1, 3, 5, …
    """
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in transformers and shape of each tensor, by its name in the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    n_kv = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (n_kv, hidden)),
        "attn_v": ("self_attn.v_proj", (n_kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
    for at in range(config["num_hidden_layers"]):
        for theirs, (ours, shape) in layer.items():
            names[f"blk.{at}.{theirs}.weight"] = (f"model.layers.{at}.{ours}.weight", shape)
    return names
