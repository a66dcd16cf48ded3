"""A tiny random GLM-4-Voice in its published layout, with its speech tokenizer and decoder."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import WhisperFeatureExtractor

from sglang_live.models.glm4_voice.family import DECODER, TOKENIZER
from sglang_live.models.glm4_voice.tokenizer import RANKS
from test.glm4_voice import decoder
from test.glm4_voice.decoder import N_CODES

HIDDEN, FFN, LAYERS, HEADS, GROUPS = 64, 96, 2, 4, 2
WORDS = ("th", "he", "the", " the", "an", "and", " a", "in", "on", "li", "lit", "tt", "st", "\n\n")
# Control tokens are in the published order, and so are the gaps between their ids.
CONTROL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>"),
)
N_WORDS = 256 + len(WORDS)
FIRST_CODE = N_WORDS + len(CONTROL) + 4
VOCAB = FIRST_CODE + N_CODES + 10
CONFIG = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_residual_connection_post_layernorm": False,
    "ffn_hidden_size": FFN,
    "fp32_residual_connection": False,
    "hidden_dropout": 0.0,
    "hidden_size": HIDDEN,
    "kv_channels": HIDDEN // HEADS,
    "layernorm_epsilon": 1.5625e-07,
    "multi_query_attention": True,
    "multi_query_group_num": GROUPS,
    "num_attention_heads": HEADS,
    "num_layers": LAYERS,
    "padded_vocab_size": VOCAB,
    "post_layer_norm": True,
    "rmsnorm": True,
    "rope_ratio": 1,
    "seq_length": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
ENCODER = {
    "model_type": "whisper",
    "activation_function": "gelu",
    "d_model": 48,
    "encoder_attention_heads": 4,
    "encoder_causal_convolution": True,
    "encoder_ffn_dim": 80,
    "encoder_layers": 4,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
    "pooling_kernel_size": 4,
    "pooling_position": 2,
    "pooling_type": "avg",
    "quantize_causal_block_size": 200,
    "quantize_causal_encoder": False,
    "quantize_position": 2,
    "quantize_vocab_size": N_CODES,
}


def special() -> dict[int, str]:
    names = {N_WORDS + n: name for n, name in enumerate(CONTROL)}
    return names | {FIRST_CODE + code: f"<|audio_{code}|>" for code in range(N_CODES)}


def ranks() -> dict[bytes, int]:
    words = (*(bytes([n]) for n in range(256)), *(word.encode() for word in WORDS))
    return {word: rank for rank, word in enumerate(words)}


def _weights() -> Iterator[tuple[str, Tensor]]:
    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape)

    head = HIDDEN // HEADS
    qkv = (HEADS + 2 * GROUPS) * head
    yield "transformer.embedding.word_embeddings.weight", random(VOCAB, HIDDEN)
    yield "transformer.rotary_pos_emb.inv_freq", random(head // 4)
    for n in range(LAYERS):
        at = f"transformer.encoder.layers.{n}"
        yield f"{at}.input_layernorm.weight", 1 + random(HIDDEN, scale=0.1)
        yield f"{at}.post_attention_layernorm.weight", 1 + random(HIDDEN, scale=0.1)
        yield f"{at}.self_attention.query_key_value.weight", random(qkv, HIDDEN, scale=0.2)
        yield f"{at}.self_attention.query_key_value.bias", random(qkv)
        yield f"{at}.self_attention.dense.weight", random(HIDDEN, HIDDEN, scale=0.2)
        yield f"{at}.mlp.dense_h_to_4h.weight", random(2 * FFN, HIDDEN, scale=0.2)
        yield f"{at}.mlp.dense_4h_to_h.weight", random(HIDDEN, FFN, scale=0.2)
    yield "transformer.encoder.final_layernorm.weight", 1 + random(HIDDEN, scale=0.1)
    output = random(VOCAB, HIDDEN)
    # It ends no response, and writes words and codes alone.
    silent = [n for n in range(VOCAB) if n >= N_WORDS and not 0 <= n - FIRST_CODE < N_CODES]
    output[silent] = 0.0
    yield "transformer.output_layer.weight", output


def _encoder_weights() -> Iterator[tuple[str, Tensor]]:
    from sglang_live.models.glm4_voice.ears import VqEncoder

    for name, tensor in VqEncoder(ENCODER).state_dict().items():
        is_norm = "layer_norm.weight" in name
        yield name, is_norm + (0.1 if tensor.ndim == 1 else 0.3) * torch.randn(tensor.shape)
    # Of the published file, what only training needed.
    width = ENCODER["d_model"]
    yield "embed_positions2.weight", torch.randn(375, width)
    yield "ema_count", torch.ones(N_CODES)
    yield "ema_weight", torch.randn(N_CODES, width)


def build(path: Path) -> Path:
    """Returns the checkpoint's directory."""
    torch.manual_seed(5)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.8, "top_p": 0.8}))
    lines = (f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in ranks().items())
    (path / RANKS).write_text("".join(lines))
    added = {str(n): {"content": name, "special": n < FIRST_CODE} for n, name in special().items()}
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    save_file(dict(_weights()), path / "model.safetensors")
    ears = path / TOKENIZER
    ears.mkdir()
    (ears / "config.json").write_text(json.dumps(ENCODER))
    WhisperFeatureExtractor(feature_size=128).save_pretrained(ears)
    save_file(dict(_encoder_weights()), ears / "model.safetensors")
    decoder.save(path / DECODER)
    return path
