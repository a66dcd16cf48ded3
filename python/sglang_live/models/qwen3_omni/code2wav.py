"""Qwen3-Omni's vocoder (Code2Wav of transformers) over streams."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from sglang_live.models.family import read_json
from sglang_live.models.speech_lm.checkpoint import fill
from sglang_live.models.speech_lm.code2wav_layers import ColumnTape
from sglang_live.models.speech_lm.frame_decoder import FrameDecoder


class StreamingCode2Wav(FrameDecoder):
    trims_start = True

    def __init__(
        self,
        module: Qwen3OmniMoeCode2Wav,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(module, device=device, dtype=dtype)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "StreamingCode2Wav":
        """Load the `code2wav.` tensors of a Qwen3-Omni checkpoint directory; see load_code2wav."""
        return cls(load_code2wav(path), device=device, dtype=dtype)

    def _build_input(self, module: nn.Module) -> None:
        self._embedding = self._place(module.code_embedding.weight)

    def _embed(self, codes: Tensor, tape: ColumnTape) -> Tensor:
        ids = (codes + self._code_offset).flatten(0, 1)
        return F.embedding_bag(ids, self._embedding, mode="mean").unflatten(0, codes.shape[:2])


def load_code2wav(path: str | Path) -> Qwen3OmniMoeCode2Wav:
    """Build transformers' vocoder from a checkpoint, on the CPU, in float32.

    Its non-persistent buffers stay on the meta device: the module carries weights and config,
    and cannot be called.

    Args:
        path: directory with config.json and one or several .safetensors files.
    Raises:
        ValueError: if config.json has no code2wav_config, or the `code2wav.` tensors are not
            exactly those of this config, by name and shape.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    if "code2wav_config" not in config:
        raise ValueError(f"{path / 'config.json'} has no code2wav_config: not a talking checkpoint")
    with torch.device("meta"):  # random initialisation of the real vocoder takes seconds
        module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config["code2wav_config"]))
    fill(module, path, "code2wav.")
    return module.eval()
