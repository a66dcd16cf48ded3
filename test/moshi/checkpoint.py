"""A tiny random Moshi, or PersonaPlex, in the layout of Kyutai's package."""

import io
import json
from pathlib import Path

import sentencepiece
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import MimiModel

from sglang_live.models.moshi.parts import gated_width
from test.mimi import tiny as tiny_mimi

N_CODES, CARD, TEXT = 4, 64, 96
# Of PersonaPlex, whose prompts have codes of the published Mimi.
PUBLISHED_CARD = 2048
DELAYS = [0, 0, 1, 1, 1, 0, 1, 1, 1]
CONFIG = {
    "dim": 64,
    "text_card": TEXT,
    "n_q": 2 * N_CODES,
    "dep_q": N_CODES,
    "card": CARD,
    "num_heads": 4,
    "num_layers": 2,
    "hidden_scale": 4.125,
    "context": 3000,
    "max_period": 10_000,
    "depformer_dim": 32,
    "depformer_dim_feedforward": 132,
    "depformer_num_heads": 2,
    "depformer_num_layers": 2,
    "delays": DELAYS,
    "mimi_config_name": "mimi.json",
}
_MIMI = {
    "seanet": {"dimension": 32, "n_filters": 4},
    "transformer": {"num_heads": 2, "num_layers": 2, "dim_feedforward": 64, "context": 250},
    "quantizer": {"bins": CARD, "dimension": 16, "n_q": 8},
}
CODEC = "tokenizer-e351c8d8-checkpoint125.safetensors"


def build(path: Path, *, kind: str = "moshi", dep_q: int = N_CODES, **changes) -> Path:
    """Returns the checkpoint's directory. changes: of config.json."""
    path.mkdir(parents=True, exist_ok=True)
    card = CARD if kind == "moshi" else PUBLISHED_CARD
    document = CONFIG | {"model_type": kind, "dep_q": dep_q, "card": card} | changes
    (path / "config.json").write_text(json.dumps(document))
    mimi_config = _MIMI | {"quantizer": _MIMI["quantizer"] | {"bins": card}}
    (path / "mimi.json").write_text(json.dumps(mimi_config))
    save_file(language_model(dep_q, card), path / "model.safetensors")
    save_file(codec(card), path / CODEC)
    (path / "tokenizer_spm_32k_3.model").write_bytes(_tokenizer())
    if kind == "personaplex":
        (path / "voices").mkdir(exist_ok=True)
        for name, seed in (("NATF0", 1), ("NATM1", 2)):
            torch.save(voice(seed), path / "voices" / f"{name}.pt")
    return path


def voice(seed: int, n: int = 7) -> dict[str, Tensor]:
    """As PersonaPlex's package saves one."""
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, PUBLISHED_CARD, (1, 1 + 2 * N_CODES, 4), generator=rng)
    codes[:, 0] = 3
    return {
        "embeddings": torch.randn(n, 1, 1, CONFIG["dim"], generator=rng),
        "cache": codes,
    }


def language_model(dep_q: int = N_CODES, card: int = CARD) -> dict[str, Tensor]:
    """Weights by the published names. Larger than by training's start, so that texts differ."""
    rng = torch.Generator().manual_seed(0)
    dim, own, n_text = CONFIG["dim"], CONFIG["depformer_dim"], CONFIG["text_card"]
    inner = gated_width(dim, int(CONFIG["hidden_scale"] * dim))
    own_inner = gated_width(own, CONFIG["depformer_dim_feedforward"])
    out: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        scale = 1.0 if "emb" in name else 2.0 * shape[-1] ** -0.5
        out[name] = scale * torch.randn(*shape, generator=rng)

    def norm(name: str, width: int) -> None:
        out[name] = 0.7 + 0.6 * torch.rand(1, 1, width, generator=rng)

    matrix("text_emb.weight", n_text + 1, dim)
    matrix("text_linear.weight", n_text, dim)
    norm("out_norm.alpha", dim)
    for n in range(CONFIG["n_q"]):
        matrix(f"emb.{n}.weight", card + 1, dim)
    for n in range(CONFIG["num_layers"]):
        layer = f"transformer.layers.{n}."
        matrix(layer + "self_attn.in_proj_weight", 3 * dim, dim)
        matrix(layer + "self_attn.out_proj.weight", dim, dim)
        matrix(layer + "gating.linear_in.weight", 2 * inner, dim)
        matrix(layer + "gating.linear_out.weight", dim, inner)
        norm(layer + "norm1.alpha", dim)
        norm(layer + "norm2.alpha", dim)
    matrix("depformer_text_emb.weight", n_text + 1, own)
    for n in range(dep_q):
        matrix(f"depformer_in.{n}.weight", own, dim)
        matrix(f"linears.{n}.weight", card, own)
        if n + 1 < dep_q:
            matrix(f"depformer_emb.{n}.weight", card + 1, own)
    for n in range(CONFIG["depformer_num_layers"]):
        layer = f"depformer.layers.{n}."
        matrix(layer + "self_attn.in_proj_weight", dep_q * 3 * own, own)
        matrix(layer + "self_attn.out_proj.weight", dep_q * own, own)
        for step in range(dep_q):
            matrix(layer + f"gating.{step}.linear_in.weight", 2 * own_inner, own)
            matrix(layer + f"gating.{step}.linear_out.weight", own, own_inner)
        norm(layer + "norm1.alpha", own)
        norm(layer + "norm2.alpha", own)
    return out


def mimi(card: int = CARD) -> MimiModel:
    """The codec in transformers, with all of its codebooks."""
    return tiny_mimi.tiny_module(num_quantizers=_MIMI["quantizer"]["n_q"], codebook_size=card)


def codec(card: int = CARD) -> dict[str, Tensor]:
    """Of mimi(), by the names of Kyutai's package."""
    out: dict[str, Tensor] = {}
    state = mimi(card).state_dict()
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            parts = [p if n == 2 else _in_pairs(p) for n, p in enumerate(parts)]
            tensor, name = torch.cat(parts), name.replace(".q_proj.weight", ".in_proj_weight")
        out[_kyutai(name)] = tensor.contiguous()
    return out


def _in_pairs(rows: Tensor) -> Tensor:
    heads = _MIMI["transformer"]["num_heads"]
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _kyutai(name: str) -> str:
    part = name.partition(".")[0]
    if part in ("encoder", "decoder"):
        name = name.replace(".layers.", ".model.", 1)
        up = part == "decoder" and ".block." not in name and name.split(".")[2] in "2 5 8 11"
        return name.replace(".conv.", ".convtr.convtr." if up else ".conv.conv.")
    if part in ("encoder_transformer", "decoder_transformer"):
        name = name.replace(".layers.", ".transformer.layers.", 1)
        for old, new in (
            (".mlp.fc1.", ".linear1."),
            (".mlp.fc2.", ".linear2."),
            (".o_proj.", ".out_proj."),
            (".input_layernorm.", ".norm1."),
            (".post_attention_layernorm.", ".norm2."),
            (".self_attn_layer_scale.", ".layer_scale_1."),
            (".mlp_layer_scale.", ".layer_scale_2."),
        ):
            name = name.replace(old, new)
        return name
    if part == "downsample":
        return "downsample.conv.conv.conv.weight"
    if part == "upsample":
        return "upsample.convtr.convtr.convtr.weight"
    name = name.replace("semantic_residual_vector_quantizer", "rvq_first")
    name = name.replace("acoustic_residual_vector_quantizer", "rvq_rest")
    name = name.replace(".layers.", ".vq.layers.").replace(".codebook.", "._codebook.")
    return name.replace(".initialized", "._initialized").replace(".embed_sum", ".embedding_sum")


def _tokenizer() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello there how are you today", "i am well thank you"] * 20),
        model_writer=model,
        vocab_size=TEXT,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        user_defined_symbols=[f"w{n}" for n in range(71)],
        minloglevel=2,
    )
    return model.getvalue()
