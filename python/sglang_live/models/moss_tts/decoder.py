"""MOSS-Audio-Tokenizer's decoder for streams: frames of codes to samples, chunk by chunk, exactly.

In: frames of 80 ms, as codes. Out: final samples.
Owner: VocoderEngine holds one MossStream per job and batches them through one MossDecoder. Every
layer sees the columns up to its own, of the last 10 s, so a chunk needs the window of each layer.
Source: MossAudioTokenizerModel (OpenMOSS/MOSS-Audio-Tokenizer), whose transformers are those of
Mimi, in the layout of moshi.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiTransformerModel

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.snac import folded
from sglang_live.models.moss_tts.family import CODEC_FOLDER, CodecSpec, CodecStage, MossSpec
from sglang_live.models.speech_lm.checkpoint import read_tensors
from sglang_live.models.speech_lm.code2wav_layers import WindowTransformer
from sglang_live.models.speech_lm.frame_decoder import check_codes

_RENAMED = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "linear1": "mlp.fc1",
    "linear2": "mlp.fc2",
    "layer_scale_1": "self_attn_layer_scale",
    "layer_scale_2": "mlp_layer_scale",
    "self_attn.out_projs.0": "self_attn.o_proj",
}
_JOINED = re.compile(r"(layers\.\d+\.self_attn\.)in_projs\.0\.weight")


class Stage:
    """Transformer layers between projections, and patches of their columns."""

    def __init__(self, spec: CodecStage, tensors: dict[str, Tensor], place):
        self._in = self._projection(tensors, "input_proj", spec.width != spec.width_in, place)
        self._out = self._projection(tensors, "output_proj", spec.width != spec.width_out, place)
        self.transformer = WindowTransformer(_mimi_module(spec, tensors), place)
        self._n_patches = spec.n_patches

    @staticmethod
    def _projection(tensors: dict[str, Tensor], name: str, has: bool, place) -> Tensor | None:
        return place(tensors[f"{name}.weight"]) if has else None

    def __call__(self, x: Tensor, windows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """x: [n_streams, n, width_in]. Returns [n_streams, n * n_patches, width] and the keys and
        values of the chunk, see WindowTransformer."""
        x, fresh = self.layers(x, windows)
        # The columns of a patch are the inner index of its channels.
        return x.unflatten(2, (-1, self._n_patches)).transpose(2, 3).flatten(1, 2), fresh

    def patched(self, x: Tensor) -> Tensor:
        """[n_streams, n, width_in] of [n_streams, n * n_patches, width], for an encoder."""
        return x.unflatten(1, (-1, self._n_patches)).transpose(2, 3).flatten(2)

    def layers(self, x: Tensor, windows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As a call, without patches."""
        if self._in is not None:
            x = F.linear(x, self._in)
        x, fresh = self.transformer(x, *self.transformer.gather(windows))
        return x if self._out is None else F.linear(x, self._out), fresh


@dataclass(slots=True, eq=False)
class MossStream:
    """The state of one stream. Dropping it frees everything; nothing else refers to it.

    windows: of each stage, see WindowTransformer.
    """

    windows: list[Tensor]


class MossDecoder:
    """A stateless decoder of many streams. Not thread-safe per stream, safe across streams.

    Attributes:
        n_quantizers: codes per frame.
        samples_per_frame, sample_rate_hz: of the sound.
        n_tail_frames, n_context_frames: see StreamDecoder.
    """

    n_tail_frames, n_context_frames = 0, None

    def __init__(
        self,
        spec: CodecSpec,
        tensors: dict[str, Tensor],
        n_books: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """
        Args:
            tensors: of decoder and quantizer by their names, in float32; copied.
            n_books: those of the codec that the talker writes, from the first on.
        """
        self._device = torch.device(device)
        self.n_quantizers, self.codebook_size = n_books, spec.codebook_size
        self.sample_rate_hz, self.samples_per_frame = spec.sampling_rate, spec.samples_per_frame

        def place(weight: Tensor) -> Tensor:
            return weight.detach().to(self._device, dtype, copy=True).contiguous()

        with torch.no_grad():
            self._tables, self._shift = map(place, _books(spec, tensors, n_books))
            self._stages = [
                Stage(stage, within(tensors, stage.name), place) for stage in spec.stages
            ]
        self._offset = torch.arange(n_books, device=self._device) * spec.codebook_size

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "MossDecoder":
        """Load the codec beside a checkpoint. Raises BadInputError if a weight is missing."""
        spec = MossSpec.load(path)
        folder = Path(path) / CODEC_FOLDER
        tensors = read_tensors(folder, "decoder.", keeps=True)
        tensors |= folded(read_tensors(folder, "quantizer.", keeps=True))
        try:
            return cls(spec.codec, tensors, spec.n_books, device=device, dtype=dtype)
        except KeyError as error:
            raise BadInputError(f"{folder}: its weights lack {error}") from error

    def new_stream(self) -> MossStream:
        return MossStream([stage.transformer.new_past(self._tables) for stage in self._stages])

    def use_graphs(self, max_streams: int) -> None:
        """There are none: it runs kernel by kernel on a GPU, too."""

    def check_codes(self, codes: Tensor) -> None:
        """See frame_decoder.check_codes."""
        check_codes(codes, self.n_quantizers, self.codebook_size)

    @torch.inference_mode()
    def decode(self, streams: list[MossStream], codes: Tensor) -> Tensor:
        """Decode the next chunk of several streams; their states change together or not at all.

        Args:
            streams: of any ages.
            codes: [n_streams, n_frames, n_quantizers] int64, n_frames >= 1, on any device.
        Returns:
            [n_streams, n_frames * samples_per_frame] float32 in [-1, 1], on the decoder's device.
        Raises:
            BadInputError: see check_codes.
            ValueError: if a stream is repeated, or the shapes do not fit.
        """
        self.check_codes(codes)
        if codes.ndim != 3 or len(codes) != len(streams) or codes.shape[1] < 1:
            raise ValueError(f"codes {list(codes.shape)} do not fit {len(streams)} streams")
        if len(set(streams)) != len(streams):
            raise ValueError("a stream occurs twice in one batch")
        ids = (codes.to(self._device) + self._offset).flatten(0, 1)
        x = F.embedding_bag(ids, self._tables, mode="sum").unflatten(0, codes.shape[:2])
        x, grown = x + self._shift, []
        for n, stage in enumerate(self._stages):
            windows = [stream.windows[n] for stream in streams]
            x, fresh = stage(x, windows)
            grown.append(
                [stage.transformer.grown(*pair) for pair in zip(windows, fresh, strict=True)]
            )
        for stream, of_stream in zip(streams, zip(*grown, strict=True), strict=True):
            stream.windows = list(of_stream)
        return x[..., 0].float().clamp_(-1.0, 1.0)


def within(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _mimi_module(spec: CodecStage, tensors: dict[str, Tensor]) -> MimiTransformerModel:
    """The stage's layers as transformers has those of Mimi; they cannot be called."""
    config = MimiConfig(
        hidden_size=spec.width,
        intermediate_size=spec.feed_forward,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_heads,
        head_dim=spec.width // spec.n_heads,
        sliding_window=spec.n_window,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
    )
    with torch.device("meta"):
        module = MimiTransformerModel(config)
    state: dict[str, Tensor] = {}
    for name, tensor in within(tensors, "transformer.").items():
        if match := _JOINED.fullmatch(name):
            query, key, value = tensor.chunk(3)
            state[f"{match[1]}q_proj.weight"] = _halves(query, spec.n_heads)
            state[f"{match[1]}k_proj.weight"] = _halves(key, spec.n_heads)
            state[f"{match[1]}v_proj.weight"] = value
            continue
        for old, new in _RENAMED.items():
            name = name.replace(f".{old}.", f".{new}.")
        state[name] = tensor
    if missing := sorted(module.state_dict().keys() - state.keys()):
        raise KeyError(f"{spec.name}transformer: {missing[:3]}")
    module.load_state_dict(state, assign=True)
    return module


def _halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a projection whose heads rotate adjacent pairs, for one that rotates halves."""
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _books(spec: CodecSpec, tensors: dict[str, Tensor], n_books: int) -> tuple[Tensor, Tensor]:
    """Tables [n_books * codebook_size, width] of what a code adds to the first stage's input, and
    what is added once."""
    has_own, has_common = spec.projects
    tables, shift = [], torch.zeros(())
    for book in range(n_books):
        name = f"quantizer.quantizers.{book}."
        table = tensors[f"{name}codebook.weight"].double()
        if has_own:
            table = table @ tensors[f"{name}out_proj.weight"][..., 0].double().T
            shift = shift + tensors[f"{name}out_proj.bias"].double()
        tables.append(table)
    whole = torch.cat(tables)
    if has_common:
        weight = tensors["quantizer.output_proj.weight"][..., 0].double().T
        whole, shift = whole @ weight, shift @ weight if has_own else shift
        shift = shift + tensors["quantizer.output_proj.bias"].double()
    return whole, shift
