"""The Mimi in a CSM checkpoint."""

from pathlib import Path

import torch
from transformers.models.mimi.modeling_mimi import MimiModel

from sglang_live.models.codecs.mimi import MimiDecoder, load_mimi
from sglang_live.models.family import read_json

CODEC_PREFIX = "codec_model."


def load_codec(checkpoint: Path) -> MimiModel:
    """See load_mimi."""
    config = read_json(checkpoint / "config.json")["codec_config"]
    return load_mimi(checkpoint, config, CODEC_PREFIX)


class CsmDecoder:
    """For the vocoder stage (models/family.py)."""

    @staticmethod
    def from_pretrained(
        path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> MimiDecoder:
        return MimiDecoder(load_codec(Path(path)), device=device, dtype=dtype)
