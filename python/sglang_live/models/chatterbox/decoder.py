"""Chatterbox's decoder of codes, S3Gen: CosyVoice 2's flow, trained to see whole pieces.

No exact chunks exist: without a cut, each code changes the sound of all before it. So a piece
sounds when its last code has come.
Source: resemble-ai/chatterbox (models/s3gen, MIT).
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.family import DECODER_WEIGHTS, voice_paths
from sglang_live.models.codecs.flow.decoder import FlowDecoder, flow_voice
from sglang_live.models.codecs.flow.mels import FlowVoice, TokenFlow
from sglang_live.models.codecs.hift import WholeHift, hift_layers
from sglang_live.models.torch_files import read_torch_file

# Turbo's, whose flow has two steps, and needs silence behind the last code.
MEAN_WEIGHTS = "s3gen_meanflow.safetensors"
_SILENCE = (4299,) * 3
_PARTS = "prompt_token", "prompt_feat", "embedding"


class ChatterboxDecoder(FlowDecoder):
    """Attributes: see FlowDecoder."""

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "ChatterboxDecoder":
        """Load a directory with the weights of S3Gen, and conds.pt or voices/NAME.pt.

        Raises:
            BadInputError: a file is missing or cannot be read, or lacks something.
        """
        path, place = Path(path), torch.device(device)
        mean = path / MEAN_WEIGHTS
        tensors = _read(mean if mean.is_file() else path / DECODER_WEIGHTS)
        flow = TokenFlow(_behind("flow.", tensors), place, dtype)
        hift = WholeHift(hift_layers(_behind("mel2wav.", tensors)), place, dtype)
        voices = {name: _voice(flow, file) for name, file in voice_paths(path).items()}
        silence = _SILENCE if flow.is_mean else ()
        return cls(flow, hift, voices, is_whole=True, silence=silence)


def _read(file: Path) -> dict[str, Tensor]:
    """Its tensors but those that make voices of recordings."""
    try:
        with safe_open(file, "pt") as tensors:
            stored = tensors.keys()
            wanted = [name for name in stored if name.startswith(("flow.", "mel2wav."))]
            return {name: tensors.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error


def _behind(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _voice(flow: TokenFlow, file: Path) -> FlowVoice:
    known = read_torch_file(file).get("gen")
    if not isinstance(known, dict):
        raise BadInputError(f"{file} is no voice of Chatterbox: it lacks 'gen'")
    # A recording of an odd number of columns has one for which there is no code.
    return flow_voice(flow, known, _PARTS, 1, str(file))
