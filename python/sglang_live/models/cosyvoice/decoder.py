"""CosyVoice's decoder of codes, for versions 2 and 3."""

from pathlib import Path

import torch

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow.decoder import (
    VOICE_PARTS,
    FlowDecoder,
    flow_voice,
)
from sglang_live.models.codecs.flow.mels import TokenFlow
from sglang_live.models.codecs.hift import hift_of
from sglang_live.models.torch_files import read_torch_file

FLOW_FILE, HIFT_FILE = "flow.pt", "hift.pt"
VOICES_FILE = "spk2info.pt"


class CosyVoiceDecoder(FlowDecoder):
    """Attributes: see FlowDecoder."""

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "CosyVoiceDecoder":
        """Load a directory with flow.pt, hift.pt and spk2info.pt.

        Raises:
            BadInputError: a file is missing or cannot be read, or lacks something.
        """
        path, place = Path(path), torch.device(device)
        flow = TokenFlow(read_torch_file(path / FLOW_FILE), place, dtype)
        hift = hift_of(read_torch_file(path / HIFT_FILE), place, dtype)
        file = path / VOICES_FILE
        voices = {
            name: flow_voice(flow, known, VOICE_PARTS, 0, f"{file}: {name}")
            for name, known in read_torch_file(file).items()
        }
        if not voices:
            raise BadInputError(f"{file} has no voices")
        return cls(flow, hift, voices)
