"""Mimi over streams: frames of codes to samples, and samples to frames of codes, exactly.

In: frames of 80 ms, as codes or as samples. Out: the others.
Owner: VocoderEngine holds one stream per job; one encoder or decoder serves streams of any ages in
one batch. Every sample is computed once. The transformers see the last 250 positions, 10 s.
Source: MimiModel of transformers (kyutai/mimi), whose decoder keeps no columns of its convolutions
and differs in chunks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiConv1d, MimiModel, MimiResnetBlock

from sglang_live.models.codecs import MimiFacts
from sglang_live.models.family import read_json
from sglang_live.models.speech_lm.checkpoint import fill
from sglang_live.models.speech_lm.code2wav_layers import (
    CausalConv,
    CausalUpsample,
    ColumnTape,
    Elu,
    Place,
    ResidualUnit,
    WindowTransformer,
)
from sglang_live.models.speech_lm.frame_decoder import FrameDecoder

_PER_FRAME = 2  # positions of the transformers


def load_mimi(path: Path, config: Mapping[str, Any], prefix: str = "") -> MimiModel:
    """transformers' module from a checkpoint, on the CPU, in float32.

    Its non-persistent buffers stay on the meta device: the module carries weights and config, and
    cannot be called.

    Args:
        path: directory with one or several .safetensors files.
        config: of the codec, from config.json.
        prefix: of the codec's tensors in a model that contains it.
    Raises:
        BadInputError: see MimiFacts.of.
        ValueError: the tensors are not exactly those of the config, by name and shape.
    """
    MimiFacts.of(config, str(path))
    with torch.device("meta"):  # random initialisation takes seconds
        module = MimiModel(MimiConfig.from_dict(dict(config)))
    fill(module, path, prefix)
    return module.eval()


def _tables(quantizer: nn.Module) -> list[Tensor]:
    """[codebook_size, codebook_dim] of each codebook of a residual quantiser."""
    books = [layer.codebook for layer in quantizer.layers]
    return [book.embed_sum / book.cluster_usage.clamp(min=book.epsilon)[:, None] for book in books]


def _parts(module: MimiModel) -> tuple[nn.Module, nn.Module]:
    split = module.quantizer
    return split.semantic_residual_vector_quantizer, split.acoustic_residual_vector_quantizer


def _convolutions(modules: nn.ModuleList, place: Place) -> list[Any]:
    """Layers of an encoder or decoder; an activation belongs to the layer behind it."""
    layers: list[Any] = []
    for before, module in pairwise([None, *modules]):
        act = Elu() if isinstance(before, nn.ELU) else None
        if isinstance(module, MimiResnetBlock):
            _, dilated, _, pointwise = module.block
            layers.append(ResidualUnit(dilated, pointwise, place, (Elu(), Elu())))
        elif isinstance(module, MimiConv1d):
            layers.append(CausalConv(module, place, act))
        elif not isinstance(module, nn.ELU):
            layers.append(CausalUpsample(module, place, act, trims_start=False))
    return layers


class MimiDecoder(FrameDecoder):
    """Attributes: see FrameDecoder."""

    trims_start = False
    positions_per_frame = _PER_FRAME

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "MimiDecoder":
        """Load a directory with config.json and .safetensors, as kyutai/mimi; see load_mimi."""
        path = Path(path)
        return cls(load_mimi(path, read_json(path / "config.json")), device=device, dtype=dtype)

    def _build_transformer(self, module: nn.Module) -> WindowTransformer:
        return WindowTransformer(module.decoder_transformer, self._place)

    def _build_layers(self, module: nn.Module) -> None:
        self._layers = _convolutions(module.decoder.layers, self._place)

    def _build_input(self, module: nn.Module) -> None:
        tables = [
            table @ part.output_proj.weight[..., 0].T
            for part in _parts(module)
            for table in _tables(part)
        ]
        self._tables = self._place(torch.cat(tables))
        self._up = CausalUpsample(module.upsample, self._place, trims_start=False)
        self._input_layers = (self._up,)

    def _embed(self, codes: Tensor, tape: ColumnTape) -> Tensor:
        ids = (codes + self._code_offset).flatten(0, 1)
        latents = F.embedding_bag(ids, self._tables, mode="sum").unflatten(0, codes.shape[:2])
        return self._up(latents.transpose(1, 2), tape).transpose(1, 2)


@dataclass(slots=True, eq=False)
class EncoderStream:
    """The state of one stream. Dropping it frees everything; nothing else refers to it.

    Attributes:
        kv: [n_layers, 2 * n_kv_heads, n_past, head_dim], unrotated keys before values.
        columns: [n_values], the convs' last input columns in layer order.
        is_begun: whether a frame was encoded.
    """

    kv: Tensor
    columns: Tensor
    is_begun: bool = False


class MimiEncoder:
    """A stateless encoder of many streams. Not thread-safe per stream, safe across streams.

    Attributes:
        n_quantizers: codes per frame.
        samples_per_frame, sample_rate_hz: of the sound.
    """

    def __init__(
        self,
        module: MimiModel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """module: as of load_mimi; its weights are copied."""
        self._device = torch.device(device)
        self._dtype = dtype

        def place(weight: Tensor) -> Tensor:
            return weight.detach().to(self._device, dtype, copy=True).contiguous()

        with torch.no_grad():
            self._layers = _convolutions(module.encoder.layers, place)
            self._transformer = WindowTransformer(module.encoder_transformer, place)
            self._down = CausalConv(module.downsample, place)
            self._inputs = [place(part.input_proj.weight[..., 0]) for part in _parts(module)]
            self._books = [[place(book) for book in _tables(part)] for part in _parts(module)]
        self._n_values = sum(layer.n_values for layer in (*self._layers, self._down))
        config = module.config
        self.n_quantizers: int = config.num_quantizers
        self.sample_rate_hz: int = config.sampling_rate
        self.samples_per_frame: int = config.frame_size

    def new_stream(self) -> EncoderStream:
        columns = torch.zeros(self._n_values, device=self._device, dtype=self._dtype)
        return EncoderStream(self._transformer.new_past(columns), columns)

    @torch.inference_mode()
    def encode(self, streams: list[EncoderStream], samples: Tensor) -> Tensor:
        """Encode the next frames of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            samples: [n_streams, n_frames * samples_per_frame] float32 in [-1, 1], n_frames >= 1,
                on any device.
        Returns:
            [n_streams, n_frames, n_quantizers] int64, on the encoder's device.
        Raises:
            ValueError: if a stream is repeated, or the shapes do not fit.
        """
        n_frames, rest = divmod(samples.shape[-1], self.samples_per_frame)
        if samples.ndim != 2 or len(samples) != len(streams) or rest or not n_frames:
            raise ValueError(
                f"samples {list(samples.shape)} do not fit {len(streams)} streams of whole frames "
                f"of {self.samples_per_frame}"
            )
        if len(set(streams)) != len(streams):
            raise ValueError("a stream occurs twice in one batch")
        columns = torch.stack([stream.columns for stream in streams])
        tape = ColumnTape(columns, is_first=False)
        x = samples.to(self._device, self._dtype).unsqueeze(1)
        for layer in self._layers:
            x = layer(x, tape)
        past, first_real = self._transformer.gather([stream.kv for stream in streams])
        hidden, fresh = self._transformer(x.transpose(1, 2), past, first_real)
        x = hidden.transpose(1, 2)
        is_begun = torch.tensor([stream.is_begun for stream in streams], device=self._device)
        self._repeat_first(columns, x, is_begun)
        codes = self._quantise(self._down(x, tape).transpose(1, 2))
        for stream, kv, row in zip(streams, fresh, tape.rewritten(), strict=True):
            stream.kv = self._transformer.grown(stream.kv, kv)
            stream.columns = row.clone()  # a view would keep the batch alive
            stream.is_begun = True
        return codes

    def _repeat_first(self, columns: Tensor, x: Tensor, is_begun: Tensor) -> None:
        """Before a stream's first column the last convolution sees that column, not zeros."""
        shape = (len(x), x.shape[1], self._down.n_columns)
        past = columns[:, -self._down.n_values :].view(shape)
        past.copy_(torch.where(is_begun[:, None, None], past, x[..., :1]))

    def _quantise(self, latents: Tensor) -> Tensor:
        """[..., n_quantizers] of [..., width]: of each residual the nearest entry of a book."""
        codes = []
        for project, books in zip(self._inputs, self._books, strict=True):
            residual = F.linear(latents, project)
            for book in books:
                # Half the square of the distance, without what is the same for all entries.
                distance = book.square().sum(dim=1) / 2 - residual @ book.T
                codes.append(distance.argmin(dim=-1))
                residual = residual - book[codes[-1]]
        return torch.stack(codes, dim=-1)
