"""Build a demo checkpoint without training, in the published file layout: random weights.

    python -m sglang_live.models.demo.build --out DIR

The ends of outputs are not random, because server tests need turns that end: thinker and talker
each end with a fixed probability per step after a minimum. Both are encoded in the weights (one
residual channel carries a constant, one marks `tts_pad`), so the engines run the checkpoint like
any other.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from sglang_live.models.demo.architecture import config_of
from sglang_live.models.demo.location import DemoSize, default_directory
from sglang_live.models.demo.tokenizer import (
    SPECIAL_TOKENS,
    build_tokenizer,
    save_processor,
)


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
    save_processor(tokenizer, directory)
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
