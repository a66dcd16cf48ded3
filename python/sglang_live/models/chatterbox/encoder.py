"""The encoders within a Chatterbox checkpoint: from recordings to what T3 and the flow know of
voices.

Source: resemble-ai/chatterbox (tts.py, tts_turbo.py: prepare_conditionals; s3gen.py: embed_ref),
MIT. Chatterbox hears codes of the first 6 s, Turbo of 15 s of a recording as loud as all others;
the flow goes on from the first 10 s.
"""

import math
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.family import (
    CODES_PART,
    DECODER_WEIGHTS,
    EMOTION,
    MEAN_WEIGHTS,
    N_CODES,
    SPEAKER_PART,
    SPEAKER_WEIGHTS,
)
from sglang_live.models.chatterbox.voice_encoder import VoiceEncoder
from sglang_live.models.chatterbox.voices import Voice
from sglang_live.models.chatterbox.weights import read_part
from sglang_live.models.codecs.flow.campplus import CamPlusPlus
from sglang_live.models.codecs.flow.recording import (
    RATE_HZ,
    at_16khz,
    joined,
    mel_columns,
    speaker_frames,
)
from sglang_live.models.codecs.flow.s3 import S3
from sglang_live.models.log_mel import LogMel
from sglang_live.sound.decoder import Samples
from sglang_live.sound.loudness import loudness_db

T = TypeVar("T")

_N_MELS, _MOST_HZ = 128, 8_000.0
_FLOW_S, _T3_S, _TURBO_S = 10, 6, 15
_TURBO_DB = -27.0


class RecordingEncoder:
    """Of recordings [n] at RATE_HZ. Weights are read when they are first needed.

    path: of the checkpoint.
    """

    def __init__(self, path: Path):
        self._path = path
        self._is_turbo = (path / MEAN_WEIGHTS).is_file()
        self._flow_file = path / (MEAN_WEIGHTS if self._is_turbo else DECODER_WEIGHTS)
        self._mels = LogMel(_N_MELS)

    def voice(self, samples: Samples) -> Voice:
        """What T3 knows. Raises BadInputError: an encoder cannot be read."""
        return Voice(self.speaker(samples), self.codes(samples), EMOTION)

    def speaker(self, samples: Samples) -> Tensor:
        """[n_values]. Raises: as voice."""
        heard = at_16khz(self._levelled(samples))
        return self._fitting(self._path / SPEAKER_WEIGHTS, lambda: self._voices.embed(heard))

    def codes(self, samples: Samples) -> Tensor:
        """[n] int64, for T3. Raises: as voice."""
        n = INPUT_RATE_HZ * (_TURBO_S if self._is_turbo else _T3_S)
        return self._codes_of(at_16khz(self._levelled(samples))[:n])

    def known(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        """What the flow knows: codes, mel and speaker. Raises: as voice."""
        samples = self._levelled(samples)[: RATE_HZ * _FLOW_S]
        samples_16khz = at_16khz(samples)
        codes = joined(self._codes_of(samples_16khz), len(samples))
        frames = speaker_frames(samples_16khz)
        speaker = self._fitting(self._flow_file, lambda: self._speakers.embed(frames))
        return codes, mel_columns(samples, _MOST_HZ), speaker

    def _levelled(self, samples: Samples) -> Samples:
        if self._is_turbo and math.isfinite(found_db := loudness_db(samples, RATE_HZ)):
            return samples * np.float32(10 ** ((_TURBO_DB - found_db) / 20))
        return samples

    def _codes_of(self, samples: Tensor) -> Tensor:
        codes = self._fitting(self._flow_file, lambda: self._s3.codes(self._mels(samples)))
        if int(codes.max()) >= N_CODES:
            raise BadInputError(f"{self._flow_file}: its tokenizer has more than {N_CODES} codes")
        return codes

    @cached_property
    def _voices(self) -> VoiceEncoder:
        return VoiceEncoder(_floats(self._path / SPEAKER_WEIGHTS, ""))

    @cached_property
    def _s3(self) -> S3:
        return S3(_floats(self._flow_file, CODES_PART))

    @cached_property
    def _speakers(self) -> CamPlusPlus:
        return CamPlusPlus(_floats(self._flow_file, SPEAKER_PART))

    def _fitting(self, file: Path, computed: Callable[[], T]) -> T:
        try:
            return computed()
        except (KeyError, RuntimeError) as error:
            raise BadInputError(f"{file} has no encoder of Chatterbox: {error}") from error


def _floats(file: Path, prefix: str) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in read_part(file, prefix).items()}
