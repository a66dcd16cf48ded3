"""What a served model bounds, and how much one request may ask of it."""

from dataclasses import dataclass
from pathlib import Path

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLimits:
    """
    vocab_size: ids from 0 below it have a row in the embedding.
    context_tokens: of prompt and answer together.
    sees: the model's chat template has a place for pictures.
    max_answers: n times prompts of one request.
    max_new_tokens: of all answers of one request together.
    max_text_chars: of all texts of one request together; the engine tokenizes them in its loop.
    """

    vocab_size: int = 2048
    context_tokens: int = 32_768
    sees: bool = False
    max_answers: int = 64
    max_new_tokens: int = 131_072
    max_text_chars: int = 1_048_576


def has_eyes(checkpoint: Path) -> bool:
    """Whether any chat template of the checkpoint places pictures."""
    files = [checkpoint / name for name in _TEMPLATES if (checkpoint / name).is_file()]
    marks = ("image_url", "'image'", '"image"', '\\"image\\"')
    return any(mark in file.read_text(errors="replace") for file in files for mark in marks)
