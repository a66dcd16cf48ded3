"""Build a demo checkpoint without training, in the published file layout: random weights.

    python -m sglang_live.models.demo.build --out DIR

The ends of outputs are not random, because server tests need turns that end: thinker and talker
each end with a fixed probability per step after a minimum. Both are encoded in the weights (one
residual channel carries a constant, one marks `tts_pad`), so the engines run the checkpoint like
any other. The architecture is exactly Qwen3-Omni's, in other sizes.
"""

import argparse
import os
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

from sglang_live.models.demo.location import DemoSize, default_directory

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
]
# ChatML with an audio placeholder for each audio part of any accepted type.
CHAT_TEMPLATE = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content -%}
{%- if part.type in ("audio", "audio_url", "input_audio") -%}
<|audio_start|><|audio_pad|><|audio_end|>
{%- elif part.type == "text" -%}{{ part.text }}{%- endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def build_tokenizer(vocab_size: int, corpus: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a text, or over the bundled one; training is deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if corpus is None:
        corpus = (
            resources.files("sglang_live.models.demo").joinpath("corpus.txt").read_text("utf-8")
        )
    # The role names must become single tokens, as in Qwen's vocabulary: repeat them.
    bpe.train_from_iterator([corpus, "system\nuser\nassistant\n" * 200], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|image_pad|>",
            "audio_token": "<|audio_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    for role in ("system", "user", "assistant"):
        ids = tokenizer.encode(role)
        if len(ids) != 1:
            raise AssertionError(f"role {role!r} is {len(ids)} tokens, the talker needs one")
    return tokenizer


def save_processor(
    tokenizer: PreTrainedTokenizerFast, directory: Path, *, sees: bool = False
) -> None:
    """sees: pictures and videos are cut for the vision tower, so that the server takes some."""
    sides = {"patch_size": 16} if sees else {}
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(**sides),
        video_processor=Qwen2VLVideoProcessor(**sides),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)


def config_of(tokenizer: PreTrainedTokenizerFast, size: DemoSize) -> Qwen3OmniMoeConfig:
    """The configuration of a whole model; special tokens are those of `tokenizer`."""
    token_id = tokenizer.convert_tokens_to_ids
    head_dim, codes = size.head_dim, size.codebook_size
    rope = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.thinker_layers,
        "num_attention_heads": size.hidden // head_dim,
        "num_key_value_heads": size.hidden // head_dim // 2,
        "head_dim": head_dim,
        "moe_intermediate_size": size.hidden // 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": rope,
    }
    media = {
        "audio_token_id": token_id("<|audio_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
    }
    thinker = {
        "text_config": text,
        # n_window as published: encoder windows decide which audio chunks are exact.
        "audio_config": {
            "d_model": size.encoder_hidden,
            "encoder_layers": size.encoder_layers,
            "encoder_attention_heads": size.encoder_hidden // 16,
            "encoder_ffn_dim": 2 * size.encoder_hidden,
            "output_dim": size.hidden,
            "num_mel_bins": 128,
            "downsample_hidden_size": size.encoder_channels,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
        },
        # Three deepstack layers: the runtime assumes that number.
        "vision_config": {
            "depth": 3,
            "hidden_size": size.vision_hidden,
            "intermediate_size": 2 * size.vision_hidden,
            "num_heads": size.vision_hidden // 16,
            "out_hidden_size": size.hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        "vision_end_token_id": token_id("<|vision_end|>"),
        "audio_end_token_id": token_id("<|audio_end|>"),
        "user_token_id": token_id("user"),
        "pad_token_id": tokenizer.pad_token_id,
        **media,
    }
    talker = {
        "text_config": {
            **text,
            "vocab_size": codes + 1024,
            "num_hidden_layers": size.talker_layers,
            "shared_expert_intermediate_size": size.hidden // 2,
        },
        "code_predictor_config": {
            "vocab_size": codes,
            "hidden_size": size.hidden,
            "intermediate_size": 2 * size.hidden,
            "num_hidden_layers": size.predictor_layers,
            "num_attention_heads": size.hidden // head_dim,
            "num_key_value_heads": size.hidden // head_dim // 2,
            "head_dim": head_dim,
            "num_code_groups": 16,
        },
        "num_code_groups": 16,
        "thinker_hidden_size": size.hidden,
        "accept_hidden_layer": size.thinker_layers // 2,
        "spatial_merge_size": 2,
        "codec_eos_token_id": codes + 102,
        "codec_nothink_id": codes + 107,
        "codec_think_bos_id": codes + 108,
        "codec_think_eos_id": codes + 109,
        "codec_pad_id": codes + 100,
        "codec_bos_id": codes + 101,
        "speaker_id": {"chelsie": codes + 253, "ethan": codes + 254, "aiden": codes + 255},
        **media,
    }
    code2wav = {
        "hidden_size": size.codec_hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 2 * size.codec_hidden,
        "codebook_size": codes,
        "num_quantizers": 16,
        "decoder_dim": size.decoder_dim,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "sliding_window": size.codec_window,
    }
    config = Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=code2wav,
        enable_audio_output=True,
        im_start_token_id=token_id("<|im_start|>"),
        im_end_token_id=token_id("<|im_end|>"),
        tts_pad_token_id=token_id("<tts_pad>"),
        tts_bos_token_id=token_id("<tts_text_bos>"),
        tts_eos_token_id=token_id("<tts_text_eod>"),
        system_token_id=token_id("system"),
        user_token_id=token_id("user"),
        assistant_token_id=token_id("assistant"),
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


def ensure_built(size: DemoSize | None = None) -> Path:
    """The random demo model's directory, built if absent. Concurrent calls are safe."""
    directory = default_directory(size)
    if not (directory / "config.json").exists():
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="building-", dir=directory.parent))
        try:
            build(scratch, size or DemoSize())
            os.replace(scratch, directory)
        except OSError:
            # Another process finished first: its result is the same.
            if not (directory / "config.json").exists():
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def build(directory: Path, size: DemoSize) -> None:
    tokenizer = build_tokenizer(size.vocab)
    model = _random_model(config_of(tokenizer, size), size)
    _speak_words_only(model, tokenizer)
    _mark_endings(model, size)
    _level_voice(model, size)
    model.save_pretrained(directory)
    save_processor(tokenizer, directory, sees=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # The end is random per step; this keeps outputs from ending at once.
    sampling = {"temperature": 0.9, "top_k": 50, "min_new_tokens": 8}
    GenerationConfig(eos_token_id=end, do_sample=True, **sampling).save_pretrained(directory)


@torch.no_grad()
def _random_model(config, size: DemoSize) -> Qwen3OmniMoeForConditionalGeneration:
    model = Qwen3OmniMoeForConditionalGeneration(config).float().eval()
    noise = torch.Generator().manual_seed(size.seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.dim() < 2:
            continue  # norms, biases and scales keep their neutral values
        # 1/sqrt(fan_in), so that every layer passes a signal of about unit size; the published
        # initialisation is so small that outputs hardly depend on inputs.
        fan_in = weight[0].numel() if "experts" not in name else weight.shape[-1]
        scale = 1.0 if "embed" in name else fan_in**-0.5
        weight.copy_(torch.randn(weight.shape, generator=noise) * scale)
    for name, weight in model.code2wav.named_parameters():
        if name.endswith("gamma") or "layer_scale" in name:
            weight.fill_(0.3)
    return model


@torch.no_grad()
def _speak_words_only(model: Qwen3OmniMoeForConditionalGeneration, tokenizer) -> None:
    """Give every token except whole words logit 0, so that it is practically never sampled."""
    n_tokens = model.config.thinker_config.text_config.vocab_size
    words = [
        token_id
        for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(range(n_tokens)))
        if token is not None and token[0] == "Ġ" and len(token) > 3 and token[1:].isalpha()
    ]
    head = model.thinker.lm_head.weight
    others = torch.ones(len(head), dtype=torch.bool)
    others[words] = False
    head[others] = 0.0


@torch.no_grad()
def _mark_endings(model: Qwen3OmniMoeForConditionalGeneration, size: DemoSize) -> None:
    """Give both language models a fixed chance to stop.

    Thinker: channel 0 of the residual stream is the same for every token and no layer writes it,
    so the end token's logit, reading only that channel, is about constant.
    Talker: channel 0 is set only where the text input is `tts_pad`, that is after the text.
    """
    thinker, talker, config = model.thinker, model.talker, model.config
    _reserve_channel(thinker.model)
    _reserve_channel(talker.model)
    thinker.model.embed_tokens.weight[:, 0] = 1.0
    # Channel 1 of the thinker's embedding is set for tts_pad alone and read by one hidden unit.
    thinker.model.embed_tokens.weight[:, 1] = 0.0
    thinker.model.embed_tokens.weight[config.tts_pad_token_id, 1] = 8.0
    talker.model.codec_embedding.weight[:, 0] = 0.0
    for embedding in talker.code_predictor.model.codec_embedding:
        embedding.weight[:, 0] = 0.0
    for projection in (talker.text_projection, talker.hidden_projection):
        projection.linear_fc2.weight[0] = 0.0
        projection.linear_fc2.bias[0] = 0.0
    gate = talker.text_projection
    gate.linear_fc1.weight[0] = 0.0
    gate.linear_fc1.weight[0, 1] = 1.0
    gate.linear_fc2.weight[0, 0] = 1.0

    noise = torch.Generator().manual_seed(size.seed)
    ids = torch.randint(len(SPECIAL_TOKENS), size.vocab, (1, 200), generator=noise)
    hidden = thinker.model(input_ids=ids).last_hidden_state
    _end_reads_channel(
        thinker.lm_head.weight, config.im_end_token_id, hidden, size.thinker_end_logit
    )
    # Frames as they look after the text: 16 code embeddings and tts_pad.
    codes = torch.randint(0, 2048, (200, 16), generator=noise)
    frames = talker.model.codec_embedding(codes[:, 0])
    for group, embedding in enumerate(talker.code_predictor.model.codec_embedding):
        frames = frames + embedding(codes[:, group + 1])
    pad = torch.tensor(config.tts_pad_token_id)
    frames = frames + talker.text_projection(thinker.model.embed_tokens(pad))
    hidden = talker.model(inputs_embeds=frames.unsqueeze(0)).last_hidden_state
    end = config.talker_config.codec_eos_token_id
    _end_reads_channel(talker.codec_head.weight, end, hidden, size.talker_end_logit)


def _end_reads_channel(
    head: torch.Tensor, end_id: int, hidden: torch.Tensor, end_logit: float
) -> None:
    """Make end_id's logit depend on channel 0 alone, end_logit on average over `hidden`."""
    head[:, 0] = 0.0
    head[end_id] = 0.0
    head[end_id, 0] = end_logit / hidden[..., 0].mean()


def _reserve_channel(stack: torch.nn.Module) -> None:
    """No layer of the stack may write residual channel 0."""
    for layer in stack.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.experts.down_proj[:, 0] = 0.0
        if hasattr(layer.mlp, "shared_expert"):
            layer.mlp.shared_expert.down_proj.weight[0] = 0.0


@torch.no_grad()
def _level_voice(model: Qwen3OmniMoeForConditionalGeneration, size: DemoSize) -> None:
    """Scale the last convolution so that random codes sound at about -20 dB RMS."""
    codec = model.code2wav
    noise = torch.Generator().manual_seed(size.seed)
    codes = torch.randint(0, codec.config.codebook_size, (1, 16, 50), generator=noise)
    last = codec.decoder[-1].conv
    last.weight.mul_(1e-3)
    wave = codec(codes)
    wave = wave - wave.mean()
    last.weight.mul_(0.1 / wave.square().mean().sqrt())
    last.bias.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="directory (default: the cache)")
    args = parser.parse_args()
    if args.out is None:
        print(ensure_built())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    build(args.out, DemoSize())
    print(args.out, file=sys.stdout)


if __name__ == "__main__":
    main()
