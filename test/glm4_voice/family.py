"""GLM-4-Voice with the toys' tones in the place of its decoder, which is not served yet."""

import torch
from torch import Tensor

from sglang_live.models.glm4_voice.family import GlmVoice
from sglang_live.models.speech_lm.frame_decoder import check_codes
from test.glm4_voice.checkpoint import N_CODES
from test.toys.counting import N_SAMPLES, Tones


class CodeTones(Tones):
    """Of more codes than a toy's."""

    @classmethod
    def from_pretrained(cls, path, device, dtype) -> "CodeTones":
        return cls(1)

    def check_codes(self, codes: Tensor) -> None:
        check_codes(codes, 1, N_CODES)

    def encode(self, streams: list[object], samples: Tensor) -> Tensor:
        strength = torch.fft.rfft(samples.view(-1, N_SAMPLES)).abs()[:, 1 : 1 + N_CODES]
        return strength.argmax(dim=1)


FAMILY = GlmVoice(__name__, f"{__name__}:CodeTones")
