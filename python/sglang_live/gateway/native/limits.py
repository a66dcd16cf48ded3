"""What a served model supports, and the most that one request may contain."""

from dataclasses import dataclass
from pathlib import Path

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLimits:
    """Limits of a request to SGLang's own API.

    vocab_size: ids from 0 below it have a row in the embedding.
    context_tokens: tokens of a prompt and its completion together.
    takes_images: whether the model's chat template has a place for images and videos.
    takes_priority: whether a priority does not change SGLang's order, nor is refused by it.
    max_completions: prompts of one request times n.
    max_new_tokens: tokens of all completions of one request together.
    max_text_chars: characters of all texts of one request together; the engine tokenizes them in
        its event loop.
    """

    vocab_size: int = 2048
    context_tokens: int = 32_768
    takes_images: bool = False
    takes_priority: bool = True
    max_completions: int = 64
    max_new_tokens: int = 131_072
    max_text_chars: int = 1_048_576


def template_takes_images(checkpoint: Path) -> bool:
    """Returns True if any chat template of the checkpoint has a place for images."""
    files = [checkpoint / name for name in _TEMPLATES if (checkpoint / name).is_file()]
    marks = ("image_url", "'image'", '"image"', '\\"image\\"')
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    return any(mark in text for text in texts for mark in marks)
