"""Tokenizer and processor files of the demo checkpoint, in the layout of a Qwen3-Omni directory."""

from importlib import resources
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

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


def save_processor(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    processor = Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(),
        video_processor=Qwen2VLVideoProcessor(),
        feature_extractor=WhisperFeatureExtractor(feature_size=128),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )
    processor.save_pretrained(directory)
