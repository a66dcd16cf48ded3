"""DAC of 44.1 kHz, whose sound is brought to the rate of the server as it comes."""

from dataclasses import dataclass
from pathlib import Path

import soxr
import torch
from torch import Tensor

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.models.codecs.dac import as_snac
from sglang_live.models.codecs.snac import SnacDecoder, SnacStream, folded
from sglang_live.models.speech_lm.checkpoint import read_tensors
from sglang_live.models.zonos.family import CODEC_FOLDER, codec_config


@dataclass(slots=True, eq=False)
class ZonosStream:
    """n_samples: of the codec, that have come."""

    codec: SnacStream
    resampler: soxr.ResampleStream
    n_samples: int = 0


class ZonosDecoder:
    """A StreamDecoder. Attributes: see SnacDecoder."""

    n_context_frames = None

    def __init__(self, codec: SnacDecoder):
        self._codec = codec
        self.n_quantizers, self.n_tail_frames = codec.n_quantizers, codec.n_tail_frames

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "ZonosDecoder":
        folder = Path(path) / CODEC_FOLDER
        config = codec_config(folder)
        layers = folded(read_tensors(folder, "decoder."))
        tensors = as_snac(layers, len(config.decoder_rates))
        tensors |= folded(read_tensors(folder, "quantizer.", keeps=True))
        return cls(SnacDecoder(config, tensors, device=device, dtype=dtype))

    def new_stream(self) -> ZonosStream:
        rates = self._codec.sample_rate_hz, OUTPUT_RATE_HZ
        return ZonosStream(self._codec.new_stream(), soxr.ResampleStream(*rates, 1))

    def use_graphs(self, max_streams: int) -> None:
        """There are none, see SnacDecoder."""

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        self._codec.check_codes(codes)

    def decode(self, streams: list[ZonosStream], codes: Tensor) -> list[Tensor]:
        """See SnacDecoder.decode; the samples are on the host."""
        waves = self._codec.decode([stream.codec for stream in streams], codes)
        return [self._resampled(*pair) for pair in zip(streams, waves, strict=True)]

    def _resampled(self, stream: ZonosStream, wave: Tensor) -> Tensor:
        stream.n_samples += len(wave)
        total, per_frame = stream.codec.n_total, self._codec.samples_per_frame
        is_last = total is not None and stream.n_samples == total * per_frame
        found = stream.resampler.resample_chunk(wave.cpu().numpy(), last=is_last)
        return torch.from_numpy(found).clamp_(-1.0, 1.0)
