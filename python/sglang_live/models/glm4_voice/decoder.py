"""GLM-4-Voice's decoder of codes: CosyVoice 1's flow with blocks, and HiFT of 22.05 kHz.

In: frames of a code of 80 ms. Out: samples at 24 kHz.
Owner: VocoderEngine holds one GlmStream per job and batches them through one GlmDecoder.
A stream is decoded as the published demo does it: in blocks that become longer, each from all codes
so far, with the mel that was made before as the flow's prompt. The last columns of a block wait for
the next one, and are faded over. The column that HiFT computes again is in that prompt twice, so
that a column is left out at each block behind the second.
Source: GLM-4-Voice, arXiv:2412.02612 (web_demo.py, flow_inference.py), whose state is in modules.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soxr
import torch
from torch import Tensor

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.hift import CutHift, HiftState, hift_layers
from sglang_live.models.glm4_voice.family import (
    BLOCK_STEP,
    DECODER,
    DECODER_CONFIG,
    FIRST_BLOCK,
    FLOW_FILE,
    HIFT_FILE,
    LONGEST_BLOCK,
    VOICE,
)
from sglang_live.models.glm4_voice.flow import (
    BLOCK,
    CODES_PER_S,
    RATE_HZ,
    BlockFlow,
    SpokenCodes,
    n_columns,
)
from sglang_live.models.speech_lm.frame_decoder import check_codes
from sglang_live.models.torch_files import read_torch_file
from sglang_live.policy.chunks import ChunkRule

# Whether a block is the last one is known with the next code, which is kept for the next block.
_RULE = ChunkRule(
    first=FIRST_BLOCK + 1, second=2 * FIRST_BLOCK, step=BLOCK_STEP, most=LONGEST_BLOCK
)
# Columns of five codes.
_OVERLAP = n_columns(5)
# What no weight tells, by name in the published config.
_FORM = {"sample_rate": RATE_HZ, "input_frame_rate": CODES_PER_S, "block_size": BLOCK}


@dataclass(slots=True, eq=False)
class GlmStream:
    """The state of one stream. Dropping it frees everything.

    Attributes:
        codes: [n] int64 on the CPU, all that came; the last one is not decoded yet.
        mel: [n_mels, n_columns], what was given to HiFT, with the columns that it had again.
        overlap: [n_mels, _OVERLAP], columns behind them, which the next block begins with.
        rule: see VoiceStream.
    """

    mel: Tensor
    overlap: Tensor | None = None
    codes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    sound: HiftState = field(default_factory=HiftState)
    resampler: soxr.ResampleStream = field(
        default_factory=lambda: soxr.ResampleStream(RATE_HZ, OUTPUT_RATE_HZ, 1)
    )
    rule: ChunkRule = _RULE

    @property
    def n_frames(self) -> int:
        return len(self.codes)


class GlmDecoder:
    """A VoiceDecoder. Attributes: see there."""

    voices = (VOICE,)
    n_quantizers = n_tail_frames = 1
    has_flow = True

    def __init__(self, flow: BlockFlow, hift: CutHift):
        self._flow, self._hift = flow, hift
        window = torch.from_numpy(np.hamming(2 * _OVERLAP)).to(flow.device, flow.dtype)
        self._fade_in, self._fade_out = window.chunk(2)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: torch.device | str,
        dtype: torch.dtype,
        flow_dtype: torch.dtype | None = None,
    ) -> "GlmDecoder":
        """Load the decoder's folder in the checkpoint's directory.

        Args:
            flow_dtype: see FlowDecoder.
        Raises:
            BadInputError: a file is missing or cannot be read, lacks something, or has another form
                than the published one.
        """
        folder, place = Path(path) / DECODER, torch.device(device)
        _check_form(folder / DECODER_CONFIG)
        flow = BlockFlow(read_torch_file(folder / FLOW_FILE), place, flow_dtype or dtype)
        return cls(
            flow, CutHift(hift_layers(read_torch_file(folder / HIFT_FILE)), place, dtype, RATE_HZ)
        )

    def new_stream(self, voice: str) -> GlmStream:
        """Raises BadInputError if there is no such voice."""
        if voice != VOICE:
            raise BadInputError(f"there is no voice {voice!r}; there is {VOICE}")
        return GlmStream(self._flow.no_mel)

    def use_graphs(self, max_streams: int) -> None:
        """There are none: norms of its flow are over all columns, so that none can be padded."""

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        check_codes(codes, self.n_quantizers, self._flow.n_codes)

    @torch.inference_mode()
    def decode(self, streams: list[GlmStream], codes: Sequence[Tensor]) -> list[Tensor]:
        """Decode the next block of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            codes: [n_frames, 1] int64 of each stream, as many as its rule says; or fewer, with
                END_CODE behind the last one.
        Returns:
            [n_samples] in [-1, 1] of each, on the host.
        Raises:
            ValueError: if a stream is repeated, or the numbers do not fit.
        """
        if len(codes) != len(streams) or len(set(streams)) != len(streams):
            raise ValueError(f"{len(codes)} chunks do not fit {len(streams)} different streams")
        ends = [bool(chunk[-1, 0] == END_CODE) for chunk in codes]
        came = [
            torch.cat((stream.codes, chunk[: len(chunk) - is_end, 0]))
            for stream, chunk, is_end in zip(streams, codes, ends, strict=True)
        ]
        given = [
            SpokenCodes(all_codes if is_end else all_codes[:-1], stream.mel)
            for stream, all_codes, is_end in zip(streams, came, ends, strict=True)
        ]
        mels = [
            self._faded(mel, stream.overlap)
            for stream, mel in zip(streams, self._flow.mels(given), strict=True)
        ]
        fresh = [
            mel if is_end else mel[:, :-_OVERLAP] for mel, is_end in zip(mels, ends, strict=True)
        ]
        sounds = self._hift.vocode([stream.sound for stream in streams], fresh, ends)
        for stream, all_codes, mel, new, (_, state) in zip(
            streams, came, mels, fresh, sounds, strict=True
        ):
            again = [] if stream.sound.mel is None else [stream.sound.mel]
            stream.codes, stream.sound = all_codes, state
            stream.mel = torch.cat((stream.mel, *again, new), 1)
            stream.overlap = mel[:, -_OVERLAP:].clone()  # a view would keep the batch alive
        return [
            self._resampled(stream, wave, is_end)
            for stream, (wave, _), is_end in zip(streams, sounds, ends, strict=True)
        ]

    def _faded(self, mel: Tensor, overlap: Tensor | None) -> Tensor:
        """The reference fails where the last block has fewer columns than are faded over."""
        if overlap is None:
            return mel
        n = min(_OVERLAP, mel.shape[1])
        faded = mel[:, :n] * self._fade_in[:n] + overlap[:, :n] * self._fade_out[:n]
        return torch.cat((faded, mel[:, n:]), 1)

    def _resampled(self, stream: GlmStream, wave: Tensor, is_end: bool) -> Tensor:
        found = stream.resampler.resample_chunk(wave.float().cpu().numpy(), last=is_end)
        return torch.from_numpy(found).clamp_(-1.0, 1.0)


def _check_form(file: Path) -> None:
    """To read the config as a whole takes the code of its classes; each of these has a line."""
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read {file}: {error}") from error
    for name, wanted in _FORM.items():
        found = re.search(rf"^ *{name}: *([\d.]+)$", text, re.MULTILINE)
        if found is None or float(found[1]) != wanted:
            told = "nothing" if found is None else found[1]
            raise BadInputError(f"{file}: {name} has to be {wanted:g}, it is {told}")
