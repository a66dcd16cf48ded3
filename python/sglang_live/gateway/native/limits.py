"""What a served model supports, and the most that one request may contain.

The forms of requests (forms.py, chat/form.py) know types and fixed bounds; the checks here know
the model. Each raises ParameterError.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.gateway.errors import ParameterError

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

    def check_tokens(self, n_tokens: int | list[int] | None, at: str) -> None:
        """Check a number of tokens, or one for each prompt."""
        if isinstance(n_tokens, list):
            for n, one in enumerate(n_tokens):
                self.check_tokens(one, f"{at}[{n}]")
        elif n_tokens is not None and n_tokens > self.context_tokens:
            raise ParameterError(at, f"must be at most {self.context_tokens}.")

    def check_ids(self, ids: list[Any], at: str, *, most: int | None = None) -> None:
        """Check a list of ids of tokens, or of lists of them.

        most: ids of one list; None: a context of them.
        """
        nested = bool(ids) and isinstance(ids[0], list)
        longest = self.max_completions if nested else most or self.context_tokens
        if len(ids) > longest:
            raise ParameterError(at, f"must be a list of at most {longest}.")
        for n, one in enumerate(ids):
            if isinstance(one, list) != nested or isinstance(one, str):
                raise ParameterError(f"{at}[{n}]", "is not like the first one.", is_kind=False)
            if nested:
                self.check_ids(one, f"{at}[{n}]", most=most)
            elif one >= self.vocab_size:
                raise ParameterError(f"{at}[{n}]", f"must be below {self.vocab_size}.")

    def check_texts(self, texts: str | list[Any], at: str) -> None:
        several = [texts] if isinstance(texts, str) else texts
        if not 1 <= len(several) <= self.max_completions:
            raise ParameterError(at, f"must be a list of 1 to {self.max_completions}.")
        for n, text in enumerate(several):
            if not isinstance(text, str):
                raise ParameterError(f"{at}[{n}]", "is not like the first one.", is_kind=False)
        if sum(map(len, several)) > self.max_text_chars:
            raise ParameterError(at, f"must have at most {self.max_text_chars} characters in all.")

    def check_amount(self, n_completions: int, most: int, at: str) -> None:
        """most: tokens of the longest completion."""
        if n_completions > self.max_completions:
            raise ParameterError(
                at, f"requests {n_completions} completions: at most {self.max_completions}."
            )
        if n_completions * most > self.max_new_tokens:
            raise ParameterError(
                at,
                f"requests {n_completions} times {most} tokens: at most {self.max_new_tokens}.",
            )


def found_in_templates(checkpoint: Path) -> dict[str, Any]:
    """Fields of NativeLimits: what the chat templates of a checkpoint have a place for."""
    files = [checkpoint / name for name in _TEMPLATES if (checkpoint / name).is_file()]
    texts = [file.read_text("utf-8", errors="replace") for file in files]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return {
        "takes_images": any(mark in text for text in texts for mark in _IMAGE_MARKS),
        "template_reads": words & frozenset(TEMPLATE_SETTINGS),
    }
