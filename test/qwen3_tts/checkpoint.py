"""A tiny random Qwen3-TTS checkpoint in the published layout: names, files and control ids.

The preset voices are `vivian`, and `eric`, who speaks a dialect.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_live.models.demo.build import build_tokenizer

CODES, GROUPS, TEXT_WIDTH = 256, 6, 48
HIDDEN, NARROW = 96, 64
PREDICTOR = {
    "vocab_size": CODES,
    "hidden_size": NARROW,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_code_groups": GROUPS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
TALKER = {
    "vocab_size": CODES + 1024,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "num_code_groups": GROUPS,
    "text_hidden_size": TEXT_WIDTH,
    "codec_pad_id": CODES + 100,
    "codec_bos_id": CODES + 101,
    "codec_eos_token_id": CODES + 102,
    "codec_think_id": CODES + 106,
    "codec_nothink_id": CODES + 107,
    "codec_think_bos_id": CODES + 108,
    "codec_think_eos_id": CODES + 109,
    "codec_language_id": {
        "english": CODES + 2,
        "chinese": CODES + 7,
        "sichuan_dialect": CODES + 14,
    },
    "spk_id": {"vivian": CODES + 200, "eric": CODES + 201},
    "spk_is_dialect": {"vivian": False, "eric": "sichuan_dialect"},
    "code_predictor_config": PREDICTOR,
}
CODEC = {
    "codebook_size": CODES,
    "codebook_dim": 32,
    "latent_dim": 48,
    "hidden_size": 40,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_quantizers": GROUPS,
    "sliding_window": 8,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-5,
    "layer_scale_initial_scale": 0.01,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 8000,
    "decoder_dim": 32,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
}
# Names and shapes are those of the reference, widths smaller than its defaults.
SPEAKER = {
    "enc_dim": HIDDEN,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_kernel_sizes": [5, 3, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 4, 1],
    "enc_attention_channels": 8,
    "enc_res2net_scale": 4,
    "enc_se_channels": 8,
    "sample_rate": 24000,
}
N_MELS = 128
# Of the last convolution, so that random codes sound without clipping.
LOUDNESS = 0.7


def build(path: Path, *, ends: bool = False, clones: bool = False, seed: int = 5) -> Path:
    """
    Args:
        ends: whether speech ends a few frames after its text; otherwise never.
        clones: whether it has a speaker encoder, as a Base checkpoint, besides its voices.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(700)
    tokenizer.save_pretrained(path)
    special = tokenizer.convert_tokens_to_ids
    config = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_type": "custom_voice",
        "im_start_token_id": special("<|im_start|>"),
        "tts_pad_token_id": special("<tts_pad>"),
        "tts_bos_token_id": special("<tts_text_bos>"),
        "tts_eos_token_id": special("<tts_text_eod>"),
        "dtype": "float32",
        "talker_config": TALKER | {"text_vocab_size": -(-len(tokenizer) // 64) * 64},
    }
    weights = _random(_talker_shapes(config["talker_config"]), seed)
    weights["talker.codec_head.weight"][TALKER["codec_eos_token_id"]] = 0
    if clones:
        config |= {"tts_model_type": "base", "speaker_encoder_config": SPEAKER}
        weights |= _random(speaker_shapes(), seed + 2)
    (path / "config.json").write_text(json.dumps(config))
    if ends:
        _end_after_text(weights, config["tts_pad_token_id"])
    save_file(weights, path / "model.safetensors")
    codec = path / "speech_tokenizer"
    codec.mkdir(exist_ok=True)
    (codec / "config.json").write_text(json.dumps({"decoder_config": CODEC}))
    weights = _random(_codec_shapes(), seed + 1)
    last = f"decoder.decoder.{len(CODEC['upsample_rates']) + 2}.conv."
    weights[f"{last}weight"] *= LOUDNESS
    weights[f"{last}bias"] *= LOUDNESS
    save_file(weights, codec / "model.safetensors")
    return path


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Weights that pass a signal of about unit size."""
    rng = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=rng)
        if name.endswith("cluster_usage"):
            weights[name] = noise.abs() * (noise > -1)  # some were never used
        elif name.endswith(("gamma", "scale")):
            weights[name] = 0.3 + 0.06 * noise
        elif name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * noise
        elif len(shape) == 1:
            weights[name] = 0.1 * noise
        elif "embedding" in name:
            weights[name] = noise
        else:
            gain = 0.7 if name.startswith("decoder.decoder.") else 1.0
            weights[name] = noise * gain * noise[0].numel() ** -0.5
    return weights


def _layers(prefix: str, config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}norm.weight": (hidden,)}
    for n in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{n}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (q, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _head_norms(prefix: str, config: dict) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}layers.{n}.self_attn.{x}_norm.weight": (config["head_dim"],)
        for n in range(config["num_hidden_layers"])
        for x in "qk"
    }


def _talker_shapes(talker: dict) -> dict[str, tuple[int, ...]]:
    text, vocab = talker["text_vocab_size"], talker["vocab_size"]
    predictor = "talker.code_predictor."
    shapes = {
        "talker.model.codec_embedding.weight": (vocab, HIDDEN),
        "talker.model.text_embedding.weight": (text, TEXT_WIDTH),
        "talker.text_projection.linear_fc1.weight": (TEXT_WIDTH, TEXT_WIDTH),
        "talker.text_projection.linear_fc1.bias": (TEXT_WIDTH,),
        "talker.text_projection.linear_fc2.weight": (HIDDEN, TEXT_WIDTH),
        "talker.text_projection.linear_fc2.bias": (HIDDEN,),
        "talker.codec_head.weight": (vocab, HIDDEN),
        f"{predictor}small_to_mtp_projection.weight": (NARROW, HIDDEN),
        f"{predictor}small_to_mtp_projection.bias": (NARROW,),
    }
    for prefix, config in (("talker.model.", talker), (f"{predictor}model.", PREDICTOR)):
        shapes |= _layers(prefix, config) | _head_norms(prefix, config)
    for n in range(GROUPS - 1):
        shapes[f"{predictor}model.codec_embedding.{n}.weight"] = (CODES, HIDDEN)
        shapes[f"{predictor}lm_head.{n}.weight"] = (CODES, NARROW)
    return shapes


def _codec_shapes() -> dict[str, tuple[int, ...]]:
    book, latent, hidden, width = (
        CODEC[name] for name in ("codebook_dim", "latent_dim", "hidden_size", "decoder_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "pre_conv.conv.weight": (latent, book, 3),
        "pre_conv.conv.bias": (latent,),
        "pre_transformer.input_proj.weight": (hidden, latent),
        "pre_transformer.input_proj.bias": (hidden,),
        "pre_transformer.output_proj.weight": (latent, hidden),
        "pre_transformer.output_proj.bias": (latent,),
        **_layers("pre_transformer.", CODEC),
    }
    for n in range(CODEC["num_hidden_layers"]):
        for part in ("self_attn", "mlp"):
            shapes[f"pre_transformer.layers.{n}.{part}_layer_scale.scale"] = (hidden,)
    for part, n_books in (("rvq_first", 1), ("rvq_rest", GROUPS - 1)):
        at = f"quantizer.{part}."
        shapes[f"{at}input_proj.weight"] = (book // 2, book, 1)
        shapes[f"{at}output_proj.weight"] = (book, book // 2, 1)
        for n in range(n_books):
            shapes[f"{at}vq.layers.{n}._codebook.cluster_usage"] = (CODES,)
            shapes[f"{at}vq.layers.{n}._codebook.embedding_sum"] = (CODES, book // 2)
    for n, factor in enumerate(CODEC["upsampling_ratios"]):
        shapes |= {
            **_conv(f"upsample.{n}.0.", (latent, latent, factor)),
            **_conv(f"upsample.{n}.1.dwconv.", (latent, 1, 7)),
            f"upsample.{n}.1.norm.weight": (latent,),
            f"upsample.{n}.1.norm.bias": (latent,),
            f"upsample.{n}.1.pwconv1.weight": (4 * latent, latent),
            f"upsample.{n}.1.pwconv1.bias": (4 * latent,),
            f"upsample.{n}.1.pwconv2.weight": (latent, 4 * latent),
            f"upsample.{n}.1.pwconv2.bias": (latent,),
            f"upsample.{n}.1.gamma": (latent,),
        }
    shapes |= _conv("decoder.0.", (width, latent, 7))
    for n, rate in enumerate(CODEC["upsample_rates"], 1):
        at = f"decoder.{n}.block."
        shapes |= _snake(f"{at}0.", width)
        shapes |= _conv(f"{at}1.", (width, width // 2, 2 * rate))
        shapes[f"{at}1.conv.bias"] = (width // 2,)
        width //= 2
        for unit in range(2, 5):
            shapes |= _snake(f"{at}{unit}.act1.", width) | _snake(f"{at}{unit}.act2.", width)
            shapes |= _conv(f"{at}{unit}.conv1.", (width, width, 7))
            shapes |= _conv(f"{at}{unit}.conv2.", (width, width, 1))
    n = len(CODEC["upsample_rates"]) + 1
    shapes |= _snake(f"decoder.{n}.", width) | _conv(f"decoder.{n + 1}.", (1, width, 7))
    return {f"decoder.{name}": shape for name, shape in shapes.items()}


def speaker_shapes() -> dict[str, tuple[int, ...]]:
    first, *middle, last = SPEAKER["enc_channels"]
    kernels, scale = SPEAKER["enc_kernel_sizes"], SPEAKER["enc_res2net_scale"]
    squeezed, attention = SPEAKER["enc_se_channels"], SPEAKER["enc_attention_channels"]
    shapes = _conv("blocks.0.", (first, N_MELS, kernels[0]))
    for n, width in enumerate(middle, 1):
        at, part = f"blocks.{n}.", width // scale
        for name in ("tdnn1", "tdnn2"):
            shapes |= _conv(f"{at}{name}.", (width, width, 1))
        for i in range(scale - 1):
            shapes |= _conv(f"{at}res2net_block.blocks.{i}.", (part, part, kernels[n]))
        for name, shape in (("1", (squeezed, width, 1)), ("2", (width, squeezed, 1))):
            shapes[f"{at}se_block.conv{name}.weight"] = shape
            shapes[f"{at}se_block.conv{name}.bias"] = shape[:1]
    shapes |= _conv("mfa.", (last, last, kernels[-1]))
    shapes |= _conv("asp.tdnn.", (attention, 3 * last, 1)) | _conv("asp.", (last, attention, 1))
    shapes |= {"fc.weight": (SPEAKER["enc_dim"], 2 * last, 1), "fc.bias": (SPEAKER["enc_dim"],)}
    return {f"speaker_encoder.{name}": shape for name, shape in shapes.items()}


def _conv(prefix: str, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}conv.weight": shape, f"{prefix}conv.bias": shape[:1]}


def _snake(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}alpha": (width,), f"{prefix}beta": (width,)}


def _end_after_text(weights: dict[str, Tensor], pad_id: int) -> None:
    """The end's logit reads channel 0, which is set where the text input is tts_pad alone."""
    text = "talker.model.text_embedding.weight"
    weights[text][:, 0] = 0
    weights[text][pad_id, 0] = 8
    for layer in ("linear_fc1", "linear_fc2"):
        weights[f"talker.text_projection.{layer}.weight"][0] = 0
        weights[f"talker.text_projection.{layer}.bias"][0] = 0
        weights[f"talker.text_projection.{layer}.weight"][0, 0] = 1
    for name, weight in weights.items():
        if name.startswith("talker.model.layers.") and name.endswith(
            ("o_proj.weight", "down_proj.weight")
        ):
            weight[0] = 0
        elif "codec_embedding" in name:
            weight[:, 0] = 0
    end = weights["talker.codec_head.weight"]
    end[:, 0] = 0
    end[TALKER["codec_eos_token_id"], 0] = 100
