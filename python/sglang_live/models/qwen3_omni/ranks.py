"""Which numbers of ranks a checkpoint's layers can be divided among. Without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_live.models.divided import check_divided, check_number

_DECODER = ("num_attention_heads", "moe_intermediate_size")


def check_ranks(path: Path, stage: str, flag: str, n_ranks: int) -> None:
    """Check that a stage's model can be divided among tensor-parallel ranks.

    Raises:
        BadInputError: names the flag, and a size that cannot be divided.
    """
    check_number(flag, n_ranks)
    if n_ranks == 1 or stage == "vocoder":
        return
    config = json.loads((path / "config.json").read_text("utf-8"))[f"{stage}_config"]
    text = config["text_config"]
    sizes = {name: text[name] for name in _DECODER}
    if shared := text.get("shared_expert_intermediate_size"):
        sizes["shared_expert_intermediate_size"] = shared
    sizes |= _encoders(config)
    check_divided(flag, n_ranks, sizes, text["num_key_value_heads"])


def _encoders(config: Mapping[str, Any]) -> dict[str, int]:
    """Attention heads of the thinker's encoders."""
    names = {"audio_config": "encoder_attention_heads", "vision_config": "num_heads"}
    return {
        f"{part}.{name}": config[part][name] for part, name in names.items() if config.get(part)
    }
