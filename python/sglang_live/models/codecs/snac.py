"""SNAC's decoder for streams: frames of codes to samples, chunk by chunk, exactly.

In: frames of codes, as a language model writes them. Out: final samples.
Owner: VocoderEngine holds one SnacStream per job and batches them through one SnacDecoder. Every
sample is computed once, and none is lost: the usual window of four frames, of which the second is
kept, is off by up to a percent, and has neither the first frame nor the last two. SNAC looks 200 ms
ahead; so the sound is behind its frames by that, and frames of END_CODE after the last one bring
the rest.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs import END_CODE
from sglang_live.models.codecs.snac_checkpoint import load_snac
from sglang_live.models.codecs.snac_config import SnacConfig
from sglang_live.models.codecs.snac_layers import (
    ChunkTape,
    Conv,
    Noise,
    ResidualUnit,
    Snake,
    Upsample,
    Weights,
    noise_table,
)

_DILATIONS = (1, 3, 9)
_ENDLESS = 1 << 40  # latent columns of a stream that has not ended


@dataclass(slots=True, eq=False)
class SnacStream:
    """The state of one stream. Dropping it frees everything; nothing else refers to it.

    Attributes:
        columns: [n_values], the layers' last input columns in their order.
        n_frames: decoded so far, with those behind the end.
        n_total: frames of the whole stream. None: it has not ended.
    """

    columns: Tensor
    n_frames: int = 0
    n_total: int | None = None


class SnacDecoder:
    """A stateless decoder of many streams. Not thread-safe per stream, safe across streams.

    A frame has its codes depth first: one of the coarsest level, then for each half of the frame
    one of the next level, before those of the half's own halves.

    Attributes:
        n_quantizers: codes per frame.
        codebook_size: codes lie in [0, codebook_size).
        samples_per_frame, sample_rate_hz: of the sound.
        n_tail_frames: frames of END_CODE with which the last samples of a stream come.
    """

    def __init__(
        self,
        config: SnacConfig,
        tensors: dict[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """tensors: those of load_snac, in float32; copied."""
        self._device, self._dtype = torch.device(device), dtype
        self._config = config
        self._weights = weights = Weights(tensors, self._device, dtype)
        self.codebook_size, self.sample_rate_hz = config.codebook_size, config.sampling_rate
        self._columns_per_frame = config.vq_strides[0]
        slots = _slots(config.vq_strides)
        self.n_quantizers = 1 + max(max(of_level) for of_level in slots)
        self._slots = torch.tensor(slots, device=self._device)
        self._codebooks = [
            weights.take(f"quantizer.quantizers.{i}.codebook.weight") for i in range(len(slots))
        ]
        self._out = [
            (weights.take(f"{name}.weight")[..., 0], weights.take(f"{name}.bias"))
            for name in (f"quantizer.quantizers.{i}.out_proj" for i in range(len(slots)))
        ]
        self._build()
        rate, delay = 1, 0
        for layer in self._layers:
            rate, delay = rate * layer.stride, delay * layer.stride + layer.delay
        self.samples_per_frame, self._delay = self._columns_per_frame * rate, delay
        self.n_tail_frames = -(-delay // self.samples_per_frame)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "SnacDecoder":
        """Load a directory with config.json and pytorch_model.bin; see load_snac."""
        return cls(*load_snac(Path(path)), device=device, dtype=dtype)

    def _build(self) -> None:
        weights, rates = self._weights, self._config.decoder_rates
        self._first = Conv(weights, "decoder.model.0")
        self._widen = (
            weights.take("decoder.model.1.weight"),
            weights.take("decoder.model.1.bias"),
        )
        self._layers: list[Conv | Upsample | Noise | ResidualUnit] = [self._first]
        table = noise_table(self._device, self._dtype)
        for block, stride in enumerate(rates):
            name = f"decoder.model.{block + 2}.block"
            act = Snake(weights, f"{name}.0")
            self._layers.append(Upsample(weights, f"{name}.1", act, stride))
            if self._config.noise:
                self._layers.append(Noise(weights, f"{name}.2.linear", block, table))
            first_unit = 3 if self._config.noise else 2
            self._layers += [
                ResidualUnit(weights, f"{name}.{first_unit + i}.block", dilation)
                for i, dilation in enumerate(_DILATIONS)
            ]
        n = len(rates) + 2
        act = Snake(weights, f"decoder.model.{n}")
        self._layers.append(Conv(weights, f"decoder.model.{n + 1}", act=act))

    def new_stream(self) -> SnacStream:
        n_values = sum(layer.n_values for layer in self._layers)
        return SnacStream(torch.zeros(n_values, device=self._device, dtype=self._dtype))

    def use_graphs(self, max_streams: int) -> None:
        """There are none: it runs kernel by kernel on a GPU, too."""

    def check_codes(self, codes: Tensor) -> None:
        """Refuse codes that are not in the codebook; on a GPU this waits for the codes.

        Args:
            codes: [..., n_quantizers] int64.
        Raises:
            BadInputError: if the dtype, the last dimension or a value is wrong.
        """
        self._check(codes, lowest=0)

    def _check(self, codes: Tensor, lowest: int) -> None:
        if codes.dtype != torch.int64 or codes.ndim < 1 or codes.shape[-1] != self.n_quantizers:
            raise BadInputError(
                f"codes must be int64 [..., {self.n_quantizers}], "
                f"got {codes.dtype} {list(codes.shape)}"
            )
        if codes.numel() == 0:
            return
        least, most = (int(value) for value in torch.aminmax(codes))
        if least < lowest or most >= self.codebook_size:
            raise BadInputError(
                f"codes must lie in [0, {self.codebook_size}), got {least} to {most}"
            )

    @torch.inference_mode()
    def decode(self, streams: list[SnacStream], codes: Tensor) -> list[Tensor]:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            codes: [n_streams, n_frames, n_quantizers] int64, n_frames >= 1, on any device. Frames
                behind a stream's last one have END_CODE in every place.
        Returns:
            [n_samples] float32 in [-1, 1] of each stream, on the decoder's device: those that its
            frames so far determine, and that it has not yet returned. In all they are n_total *
            samples_per_frame.
        Raises:
            BadInputError: see check_codes.
            ValueError: if a stream is repeated or goes on behind its end, or the shapes do not fit.
        """
        if codes.ndim != 3 or len(codes) != len(streams) or codes.shape[1] < 1:
            raise ValueError(f"codes {list(codes.shape)} do not fit {len(streams)} streams")
        if len(set(streams)) != len(streams):
            raise ValueError("a stream occurs twice in one batch")
        self._check(codes, lowest=END_CODE)
        totals = _totals(streams, codes)
        tape = self._tape(streams, totals)
        wave = self._compute(codes.to(self._device), tape)
        n_frames, rows = codes.shape[1], tape.rewritten()
        waves = []
        for stream, total, samples, row in zip(streams, totals, wave, rows, strict=True):
            at = stream.n_frames * self.samples_per_frame - self._delay
            end = len(samples) if total is None else total * self.samples_per_frame - at
            waves.append(samples[max(0, -at) : max(0, end)])
            stream.columns = row.clone()  # a view would keep the batch alive
            stream.n_frames += n_frames
            stream.n_total = total
        return waves

    def _tape(self, streams: list[SnacStream], totals: list[int | None]) -> ChunkTape:
        per_frame = self._columns_per_frame
        begin = [stream.n_frames * per_frame for stream in streams]
        end = [_ENDLESS if total is None else total * per_frame for total in totals]
        grown = all(stream.n_frames >= self.n_tail_frames for stream in streams)
        return ChunkTape(
            torch.stack([stream.columns for stream in streams]),
            torch.tensor(begin, device=self._device).unsqueeze(1),
            torch.tensor(end, device=self._device).unsqueeze(1),
            is_inner=grown and all(total is None for total in totals),
        )

    def _compute(self, codes: Tensor, tape: ChunkTape) -> Tensor:
        """[n_streams, n_samples] float32, without a wait for the device."""
        latents = tape.inside(self._latents(codes))
        weight, bias = self._widen
        wave = tape.inside(F.conv1d(self._first(latents, tape), weight, bias))
        for layer in self._layers[1:]:
            wave = layer(wave, tape)
        return wave[:, 0].float().tanh_()

    def _latents(self, codes: Tensor) -> Tensor:
        """[n_streams, n_latent, n_columns] of codes [n_streams, n_frames, n_quantizers]."""
        spread = codes.clamp(min=0)[..., self._slots]  # [n_streams, n_frames, n_levels, n_columns]
        latents = torch.zeros((), device=self._device, dtype=self._dtype)
        for level, (book, (weight, bias)) in enumerate(
            zip(self._codebooks, self._out, strict=True)
        ):
            ids = spread[:, :, level].flatten(1)
            latents = latents + F.linear(F.embedding(ids, book), weight, bias)
        return latents.transpose(1, 2)


def _slots(vq_strides: tuple[int, ...]) -> list[list[int]]:
    """Of each level and each latent column of a frame, the place of its code in the frame."""
    n_columns, place = vq_strides[0], 0
    slots = [[0] * n_columns for _ in vq_strides]
    for column in range(n_columns):
        for level, stride in enumerate(vq_strides):
            if column % stride == 0:
                slots[level][column : column + stride] = [place] * stride
                place += 1
    return slots


def _totals(streams: list[SnacStream], codes: Tensor) -> list[int | None]:
    """The frames of each whole stream, as far as known with this chunk."""
    is_end = codes == END_CODE
    n_frames = codes.shape[1]
    n_real = (~is_end[..., 0]).sum(1)
    ended = torch.arange(n_frames, device=codes.device) >= n_real.unsqueeze(1)
    if not torch.equal(is_end, ended.unsqueeze(2).expand_as(is_end)):
        raise ValueError("END_CODE is not in every place of the frames behind the last one")
    totals: list[int | None] = []
    for stream, n in zip(streams, n_real.tolist(), strict=True):
        if stream.n_total is not None and n:
            raise ValueError(f"a stream of {stream.n_total} frames goes on behind its end")
        if stream.n_total is None and n < n_frames:
            totals.append(stream.n_frames + n)
        else:
            totals.append(stream.n_total)
    return totals
