"""The decoder of the codec beside a Higgs checkpoint: a DAC, before which codes are projected."""

from pathlib import Path

import torch
from torch import Tensor

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.dac import as_snac
from sglang_live.models.codecs.snac import SnacDecoder, folded
from sglang_live.models.higgs_v2.family import CODEC_FOLDER, codec_config
from sglang_live.models.speech_lm.checkpoint import read_tensors


class HiggsDecoder:
    """For the vocoder stage (models/family.py)."""

    @staticmethod
    def from_pretrained(
        path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> SnacDecoder:
        folder = Path(path) / CODEC_FOLDER
        config = codec_config(folder)
        layers = folded(read_tensors(folder, "acoustic_decoder."))
        tensors = as_snac(layers, len(config.decoder_rates))
        try:
            tensors |= _books(folder, len(config.vq_strides))
        except KeyError as error:
            raise BadInputError(f"{folder}: its weights lack {error}") from error
        return SnacDecoder(config, tensors, device=device, dtype=dtype)


def _books(folder: Path, n_books: int) -> dict[str, Tensor]:
    """Both projections behind a book are one. The bias of the second one is the first book's."""
    found = read_tensors(folder, "quantizer.quantizers.")
    second = read_tensors(folder, "fc2.")
    weight, bias = second["weight"].double(), second["bias"].double()
    tensors = {}
    for book in range(n_books):
        name, to = f"{book}.project_out", f"quantizer.quantizers.{book}"
        tensors[f"{to}.codebook.weight"] = found[f"{book}.codebook.embed"]
        joined = weight @ found[f"{name}.weight"].double()
        tensors[f"{to}.out_proj.weight"] = joined.unsqueeze(2)
        shift = weight @ found[f"{name}.bias"].double()
        tensors[f"{to}.out_proj.bias"] = shift if book else shift + bias
    return tensors
