"""CosyVoice's decoder of codes, for versions 2 and 3."""

import pickle
from pathlib import Path
from typing import Any

import torch

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow.decoder import FlowDecoder, flow_voice
from sglang_live.models.codecs.flow.mels import TokenFlow
from sglang_live.models.codecs.hift import hift_of

FLOW_FILE, HIFT_FILE = "flow.pt", "hift.pt"
# As CosyVoice writes it (add_zero_shot_spk, save_spkinfo), with the codes, mel and speaker of the
# recordings: to make them takes ONNX models.
VOICES_FILE = "spk2info.pt"
_PARTS = "flow_prompt_speech_token", "prompt_speech_feat", "flow_embedding"


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
        flow = TokenFlow(_read(path / FLOW_FILE), place, dtype)
        hift = hift_of(_read(path / HIFT_FILE), place, dtype)
        file = path / VOICES_FILE
        voices = {
            name: flow_voice(flow, known, _PARTS, 0, f"{file}: {name}")
            for name, known in _read(file).items()
        }
        if not voices:
            raise BadInputError(f"{file} has no voices")
        return cls(flow, hift, voices)


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error
