"""The encoders beside a CosyVoice checkpoint: from recordings to what the talker and the flow know
of voices, as `spk2info.pt` has it.

Both are published as ONNX files: S3, which hears a code every 40 ms, and CAM++, which hears the
speaker (arXiv 2303.00332).
Source: FunAudioLLM/CosyVoice (cli/frontend.py: frontend_zero_shot), Apache-2.0.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.models.codecs.flow.recording import (
    SPEAKER_WIDTH,
    at_16khz,
    joined,
    mel_columns,
    speaker_frames,
)
from sglang_live.models.cosyvoice.family import N_CODES, SPEAKER_FILE, version_of
from sglang_live.models.log_mel import LogMel
from sglang_live.models.phoneme_voice import open_onnx
from sglang_live.sound.decoder import Samples

_N_MELS = 128


class RecordingEncoder:
    """path: of the checkpoint. An ONNX file is opened when it is first needed."""

    def __init__(self, path: Path):
        self._path, self._version = path, version_of(path)
        self._mels = LogMel(_N_MELS)

    def codes(self, samples: Samples) -> Tensor:
        """[n] int64 of a recording, at RATE_HZ. Raises BadInputError: the file is no S3."""
        mels = self._mels(at_16khz(samples))[None].numpy()
        found = self._s3(mels, np.array([mels.shape[2]], np.int32))
        codes = joined(torch.from_numpy(found).flatten().long(), len(samples))
        if not len(codes) or not 0 <= int(codes.min()) <= int(codes.max()) < N_CODES:
            raise self._s3.error(f"its codes are not below {N_CODES}")
        return codes

    def known(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        """What the flow knows of a voice: codes, mel and speaker. samples: as of codes.

        Raises:
            BadInputError: a file is of another network.
        """
        codes = self.codes(samples)
        mel = mel_columns(samples, self._version.most_hz)[: UPSAMPLING * len(codes)]
        speaker = self._campplus(speaker_frames(at_16khz(samples))[None].numpy()).flatten()
        if len(speaker) != SPEAKER_WIDTH:
            raise self._campplus.error(f"it finds {len(speaker)} values of a speaker")
        return codes, mel, torch.from_numpy(speaker)

    @cached_property
    def _s3(self) -> "_Network":
        return _Network(self._path / self._version.codes_file)

    @cached_property
    def _campplus(self) -> "_Network":
        return _Network(self._path / SPEAKER_FILE)


class _Network:
    def __init__(self, file: Path):
        self._file, self._session = file, open_onnx(file, ())
        self._names = [given.name for given in self._session.get_inputs()]

    def error(self, what: str) -> BadInputError:
        return BadInputError(f"{self._file} is another network: {what}")

    def __call__(self, *values: np.ndarray) -> np.ndarray:
        """The first output. values: by the order of the inputs, whose names differ."""
        if len(values) != len(self._names):
            raise self.error(f"its inputs are {', '.join(self._names)}")
        try:
            found = self._session.run(None, dict(zip(self._names, values, strict=True)))[0]
        except Exception as error:  # onnxruntime's own classes derive from Exception alone
            raise self.error(str(error)) from error
        return np.asarray(found)
