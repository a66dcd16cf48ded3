"""Mimi as Kyutai's package names its weights; sound of the user and of the model pass it."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiModel

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.mimi import MimiDecoder, MimiEncoder
from sglang_live.models.moshi.family import MoshiSpec

# Parts of names, in this order, and what they are in transformers.
_RENAMED = (
    (r"\.conv\.conv\.conv\.", ".conv."),
    (r"\.convtr\.convtr\.convtr\.", ".conv."),
    (r"\.conv\.conv\.", ".conv."),
    (r"\.convtr\.convtr\.", ".conv."),
    (r"rvq_first\.vq\.", "rvq_first."),
    (r"rvq_rest\.vq\.", "rvq_rest."),
    (r"rvq_first\.", "semantic_residual_vector_quantizer."),
    (r"rvq_rest\.", "acoustic_residual_vector_quantizer."),
    (r"\._codebook\.", ".codebook."),
    (r"\._initialized$", ".initialized"),
    (r"\.embedding_sum$", ".embed_sum"),
    (r"^(en|de)coder\.model\.", r"\1coder.layers."),
    (r"^(en|de)coder_transformer\.transformer\.", r"\1coder_transformer."),
    (r"\.linear1\.", ".mlp.fc1."),
    (r"\.linear2\.", ".mlp.fc2."),
    (r"\.self_attn\.out_projs?(\.0)?\.", ".self_attn.o_proj."),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
    (r"\.layer_scale_1\.", ".self_attn_layer_scale."),
    (r"\.layer_scale_2\.", ".mlp_layer_scale."),
)
_JOINED = re.compile(r"\.in_proj(s\.0\.|_)weight$")
_ACOUSTIC = re.compile(r"acoustic_residual_vector_quantizer\.layers\.(\d+)\.")


def load_codec(spec: MoshiSpec) -> MimiModel:
    """transformers' module with the first codebooks, as of codecs.mimi.load_mimi.

    Raises:
        BadInputError: the file is no Mimi of this size.
    """
    with torch.device("meta"):
        module = MimiModel(MimiConfig.from_dict(dict(spec.codec_config)))
    wanted = {name: tuple(weight.shape) for name, weight in module.state_dict().items()}
    tensors = dict(_renamed(spec))
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wrong := sorted(name for name, _ in wanted.items() ^ found.items()):
        raise BadInputError(
            f"{spec.codec} is no Mimi of {spec.codec_config['num_quantizers']} codebooks and these "
            f"sizes: {len(wrong)} tensors are missing, unexpected or of another size {wrong[:3]}"
        )
    module.load_state_dict(tensors, assign=True)
    return module.eval()


def _renamed(spec: MoshiSpec) -> Iterator[tuple[str, Tensor]]:
    n_acoustic = spec.n_codes - 1
    with safe_open(spec.codec, framework="pt", device="cpu") as weights:
        for name in weights.keys():  # noqa: SIM118 (a safetensors file is no mapping)
            new = name
            for old, becomes in _RENAMED:
                new = re.sub(old, becomes, new)
            match = _ACOUSTIC.search(new)
            if match and int(match[1]) >= n_acoustic:
                continue  # codebooks that the language model does not know
            tensor = weights.get_tensor(name).float()
            if not _JOINED.search(new):
                yield new, tensor
                continue
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                rows = rows if part == "v" else _in_halves(rows, spec)
                yield _JOINED.sub(f".{part}_proj.weight", new), rows.contiguous()


def _in_halves(rows: Tensor, spec: MoshiSpec) -> Tensor:
    """Rows of queries or keys whose RoPE turns adjacent rows, for one that turns halves."""
    heads = spec.codec_config["num_attention_heads"]
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


class MoshiCodec(MimiDecoder):
    """For the vocoder stage (models/family.py).

    Attributes:
        encoder: of the user's sound.
    """

    encoder: MimiEncoder

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "MoshiCodec":
        module = load_codec(MoshiSpec.load(path))
        codec = cls(module, device=device, dtype=dtype)
        codec.encoder = MimiEncoder(module, device=device, dtype=dtype)
        return codec
