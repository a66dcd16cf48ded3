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
from sglang_live.models.codecs.flow.recording import RATE_HZ
from sglang_live.models.codecs.hift import hift_of
from sglang_live.models.cosyvoice.encoder import RecordingEncoder
from sglang_live.models.cosyvoice.family import VOICES
from sglang_live.models.torch_files import read_torch_file
from sglang_live.models.voice_files import read_recording, voice_files

FLOW_FILE, HIFT_FILE = "flow.pt", "hift.pt"


class CosyVoiceDecoder(FlowDecoder):
    """Attributes: see FlowDecoder."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str,
        dtype: torch.dtype,
        voices: Path | None = None,
        flow_dtype: torch.dtype | None = None,
    ) -> "CosyVoiceDecoder":
        """Load a directory with flow.pt, hift.pt and spk2info.pt.

        Args:
            voices: directory of recordings whose voices it takes on.
            flow_dtype: see FlowDecoder.
        Raises:
            BadInputError: a file is missing or cannot be read, or lacks something.
        """
        path, place = Path(path), torch.device(device)
        flow = TokenFlow(read_torch_file(path / FLOW_FILE), place, flow_dtype or dtype)
        hift = hift_of(read_torch_file(path / HIFT_FILE), place, dtype)
        made, file = {}, path / VOICES
        if file.is_file():
            for name, known in read_torch_file(file).items():
                made[name] = flow_voice(flow, known, VOICE_PARTS, 0, f"{file}: {name}")
        if voices is not None:
            encoder = RecordingEncoder(path)
            for name, recording in voice_files(voices).items():
                made[name] = flow.voice(*encoder.known(read_recording(recording, RATE_HZ)))
        if not made:
            raise BadInputError(f"{path} has no voices: neither {VOICES} nor recordings")
        return cls(flow, hift, made)
