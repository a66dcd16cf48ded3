"""The parts as one checkpoint directory, in the published layout and half precision."""

from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from sglang_live.models.demo.architecture import config_of
from sglang_live.models.demo.tokenizer import build_tokenizer, save_processor
from training.demo.schedule import seeded
from training.demo.sizes import SIZE

EMBEDDING_STD = 0.3


def blank_model(corpus: str) -> tuple[Qwen3OmniMoeForConditionalGeneration, object]:
    """Untrained, with its tokenizer. Token embeddings are final: random, and never trained.

    So the thinker's parts and the talker can be trained apart, and still mean the same words.
    """
    seeded(SIZE.seed)
    tokenizer = build_tokenizer(SIZE.vocab, corpus)
    model = Qwen3OmniMoeForConditionalGeneration(config_of(tokenizer, SIZE)).float()
    noise = torch.Generator().manual_seed(SIZE.seed)
    with torch.no_grad():
        for weight in model.parameters():
            if not torch.isfinite(weight).all():
                weight.zero_()  # memory that transformers leaves unset
        weight = model.thinker.model.embed_tokens.weight
        weight.copy_(EMBEDDING_STD * torch.randn(weight.shape, generator=noise))
    return model, tokenizer


def save(model: Qwen3OmniMoeForConditionalGeneration, tokenizer, directory: Path) -> None:
    """The audience of the model runs it greedily: it knows one answer to each question."""
    model.half().save_pretrained(directory)
    save_processor(tokenizer, directory)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(eos_token_id=end, do_sample=True, temperature=0.1, top_k=1).save_pretrained(
        directory
    )
