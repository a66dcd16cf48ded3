"""Chatterbox's decoder of codes, S3Gen: CosyVoice 2's flow, trained to see whole pieces.

No exact chunks exist: without a cut, each code changes the sound of all before it. So a piece
sounds when its last code has come.
Source: resemble-ai/chatterbox (models/s3gen, MIT).
"""

from pathlib import Path

import numpy as np
import torch

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    DECODER_WEIGHTS,
    MEAN_WEIGHTS,
    is_recording,
    voice_paths,
)
from sglang_live.models.chatterbox.voices import split_values
from sglang_live.models.chatterbox.weights import read_part
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.codecs.flow.decoder import FlowDecoder, flow_voice
from sglang_live.models.codecs.flow.mels import FlowVoice, TokenFlow
from sglang_live.models.codecs.hift import WholeHift, hift_layers
from sglang_live.models.torch_files import read_torch_file
from sglang_live.models.voice_files import read_recording

# Behind the last code, for Turbo's.
_SILENCE = (4299,) * 3
_PARTS = "prompt_token", "prompt_feat", "embedding"


class ChatterboxDecoder(FlowDecoder):
    """Attributes: see FlowDecoder."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str,
        dtype: torch.dtype,
        voices: Path | None = None,
        flow_dtype: torch.dtype | None = None,
    ) -> "ChatterboxDecoder":
        """Load a directory with the weights of S3Gen, and conds.pt or voices/NAME.pt.

        Args:
            voices: directory of recordings whose voices it takes on.
            flow_dtype: see FlowDecoder.
        Raises:
            BadInputError: a file is missing or cannot be read, or lacks something.
        """
        path, place = Path(path), torch.device(device)
        mean = path / MEAN_WEIGHTS
        file = mean if mean.is_file() else path / DECODER_WEIGHTS
        flow = TokenFlow(read_part(file, "flow."), place, flow_dtype or dtype)
        hift = WholeHift(hift_layers(read_part(file, "mel2wav.")), place, dtype)
        encoder = RecordingEncoder(path)
        known = {}
        for name, voice in voice_paths(path, voices).items():
            if is_recording(voice):
                known[name] = flow.voice(*encoder.known(read_recording(voice, RECORDING_RATE_HZ)))
            else:
                known[name] = _voice(flow, voice)
        silence = _SILENCE if flow.is_mean else ()
        return cls(flow, hift, known, is_whole=True, silence=silence)

    def _brought(self, speaker: np.ndarray) -> FlowVoice:
        return super()._brought(split_values(speaker)[1])


def _voice(flow: TokenFlow, file: Path) -> FlowVoice:
    known = read_torch_file(file).get("gen")
    if not isinstance(known, dict):
        raise BadInputError(f"{file} is no voice of Chatterbox: it lacks 'gen'")
    # A recording of an odd number of columns has one for which there is no code.
    return flow_voice(flow, known, _PARTS, 1, str(file))
