"""The encoder of the codec beside a MOSS-TTS checkpoint: sound of a speaker to codes.

As its decoder the other way round: patches of samples, and causal transformers between them.
Source: MossAudioTokenizerModel (OpenMOSS/MOSS-Audio-Tokenizer); the loudness is that of the
processor of MOSS-TTS.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.snac import folded
from sglang_live.models.moss_tts.decoder import Stage, within
from sglang_live.models.moss_tts.family import CODEC_FOLDER, CodecSpec, MossSpec
from sglang_live.models.speech_lm.checkpoint import read_tensors

# Frames that are encoded at once: about as long as the window.
_CHUNK = 128
_LOUDNESS_DB, _MOST_GAIN_DB, _LEAST_POWER = -20.0, 3.0, 1e-9


class MossEncoder:
    """
    Attributes:
        sample_rate_hz, samples_per_frame: of the sound.
    """

    def __init__(self, checkpoint: Path):
        """Raises BadInputError if a weight is missing."""
        spec = MossSpec.load(checkpoint)
        folder = checkpoint / CODEC_FOLDER
        self.sample_rate_hz = spec.codec.sampling_rate
        self.samples_per_frame = spec.codec.samples_per_frame
        layers = read_tensors(folder, "encoder.", keeps=True)
        books = folded(read_tensors(folder, "quantizer.", keeps=True))
        try:
            self._stages = [
                Stage(stage, within(layers, stage.name), torch.Tensor.contiguous)
                for stage in spec.codec.encoder
            ]
            self._books = [_Book(spec.codec, books, book) for book in range(spec.n_books)]
            self._in: tuple[Tensor, Tensor] | None = None
            if spec.codec.has_inner_width:
                self._in = tuple(
                    books[f"quantizer.input_proj.{kind}"] for kind in ("weight", "bias")
                )
        except KeyError as error:
            raise BadInputError(f"{folder}: its weights lack {error}") from error
        # An engine loads its model with another type and device by default.
        self._like = torch.zeros((), device="cpu", dtype=torch.float32)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """[n_frames, n_books] int64 of [n_frames * samples_per_frame] float32 on the CPU."""
        loudness_db = 10 * (samples.square().mean() + _LEAST_POWER).log10()
        gain_db = (_LOUDNESS_DB - loudness_db).clamp(-_MOST_GAIN_DB, _MOST_GAIN_DB)
        samples = samples * 10 ** (gain_db / 20)
        windows = [stage.transformer.new_past(self._like) for stage in self._stages]
        found = []
        for chunk in samples.split(_CHUNK * self.samples_per_frame):
            x = chunk[None, :, None]
            for n, stage in enumerate(self._stages):
                x, fresh = stage.layers(stage.patched(x), [windows[n]])
                windows[n] = stage.transformer.grown(windows[n], fresh[0])
            found.append(x[0])
        rest, codes = torch.cat(found), []
        if self._in is not None:
            weight, bias = self._in
            rest = F.linear(rest, weight[..., 0], bias)
        for book in self._books:
            chosen, said = book.nearest(rest)
            codes.append(chosen)
            rest = rest - said
        return torch.stack(codes, dim=1)


class _Book:
    def __init__(self, spec: CodecSpec, tensors: dict[str, Tensor], number: int):
        name = f"quantizer.quantizers.{number}"
        self._codes = tensors[f"{name}.codebook.weight"]
        self._in: tuple[Tensor, Tensor] | None = None
        self._out: tuple[Tensor, Tensor] | None = None
        if spec.projects[0]:
            self._in, self._out = (
                (tensors[f"{name}.{way}_proj.weight"][..., 0], tensors[f"{name}.{way}_proj.bias"])
                for way in ("in", "out")
            )

    def nearest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The codes [n] by their angles to x [n, width], and what they say, as x."""
        inner = x if self._in is None else F.linear(x, *self._in)
        codes = (F.normalize(inner) @ F.normalize(self._codes).t()).argmax(dim=1)
        said = self._codes[codes]
        return codes, said if self._out is None else F.linear(said, *self._out)
