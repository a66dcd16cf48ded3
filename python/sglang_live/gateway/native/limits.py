"""What a served model supports, and the most that one request may contain."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Settings of a chat that only a chat template can give an effect.
TEMPLATE_SETTINGS = ("reasoning_effort", "enable_thinking", "thinking")
_IMAGE_MARKS = ("image_url", "'image'", '"image"', '\\"image\\"')
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLimits:
    """Limits of a request to SGLang's own API.

    vocab_size: ids from 0 below it have a row in the embedding.
    context_tokens: tokens of a prompt and its completion together.
    template_reads: which of TEMPLATE_SETTINGS the model's chat template reads.
    takes_images: whether the model's chat template has a place for images and videos.
    takes_priority: whether a priority does not change SGLang's order, nor is refused by it.
    max_completions: prompts of one request times n.
    max_new_tokens: tokens of all completions of one request together.
    max_text_chars: characters of all texts of one request together; the engine tokenizes them in
        its event loop.
    """

    vocab_size: int = 2048
    context_tokens: int = 32_768
    template_reads: frozenset[str] = frozenset(TEMPLATE_SETTINGS)
    takes_images: bool = False
    takes_priority: bool = True
    max_completions: int = 64
    max_new_tokens: int = 131_072
    max_text_chars: int = 1_048_576


def found_in_templates(checkpoint: Path) -> dict[str, Any]:
    """Fields of NativeLimits: what the chat templates of a checkpoint have a place for."""
    files = [checkpoint / name for name in _TEMPLATES if (checkpoint / name).is_file()]
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return {
        "takes_images": any(mark in text for text in texts for mark in _IMAGE_MARKS),
        "template_reads": words & frozenset(TEMPLATE_SETTINGS),
    }
