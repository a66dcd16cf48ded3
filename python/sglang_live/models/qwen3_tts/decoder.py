"""The decoder of Qwen3-TTS's 12.5 Hz codec over streams.

Its layers are those of Qwen3-Omni's vocoder; before them are a split residual quantiser and a
causal convolution, and the transformer has a width of its own.
Source: qwen_tts, Qwen3TTSTokenizerV2Decoder.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCausalConvNet,
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavTransformerModel,
)

from sglang_live.models.family import read_json
from sglang_live.models.qwen3_tts.family import CODEC
from sglang_live.models.speech_lm.checkpoint import fill
from sglang_live.models.speech_lm.code2wav_layers import CausalConv, ColumnTape
from sglang_live.models.speech_lm.frame_decoder import FrameDecoder

# Entries of a codebook that training never used are divided by it.
_LEAST_USAGE = 1e-5


class StreamingCodecDecoder(FrameDecoder):
    trims_start = False

    @classmethod
    def from_pretrained(
        cls, path: str | Path, device: torch.device | str, dtype: torch.dtype
    ) -> "StreamingCodecDecoder":
        """Load the decoder of a Qwen3-TTS checkpoint directory.

        Raises:
            ValueError: its tensors are not exactly those of its config, by name and shape.
        """
        codec = Path(path) / CODEC
        with torch.device("meta"):  # random initialisation takes seconds
            module = CodecModule(read_json(codec / "config.json")["decoder_config"])
        fill(module, codec, "decoder.")
        return cls(module.eval(), device=device, dtype=dtype)

    def _build_input(self, module: nn.Module) -> None:
        tables = [t for part in module.quantizer.children() for t in part.tables()]
        self._tables = self._place(torch.cat(tables))
        transformer, conv = module.pre_transformer, module.pre_conv.conv
        # The projection behind the convolution is linear, and folds into it.
        weight = torch.einsum("hl,lck->hck", transformer.input_proj.weight, conv.weight)
        bias = transformer.input_proj.weight @ conv.bias + transformer.input_proj.bias
        folded = nn.Conv1d(weight.shape[1], len(weight), weight.shape[2], device="meta")
        folded.weight = nn.Parameter(weight)
        folded.bias = nn.Parameter(bias)
        self._front = CausalConv(SimpleNamespace(conv=folded), self._place)
        self._input_layers = (self._front,)
        self._out = self._place(transformer.output_proj.weight)
        self._out_bias = self._place(transformer.output_proj.bias)

    def _embed(self, codes: Tensor, tape: ColumnTape) -> Tensor:
        ids = (codes + self._code_offset).flatten(0, 1)
        latents = F.embedding_bag(ids, self._tables, mode="sum").unflatten(0, codes.shape[:2])
        return self._front(latents.transpose(1, 2), tape).transpose(1, 2)

    def _leave(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._out, self._out_bias)


class CodecModule(nn.Module):
    """Weights and config of a codec's decoder, by the names of its checkpoint; never called.

    Args:
        config: decoder_config of the codec's checkpoint.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        latent, hidden = config["latent_dim"], config["hidden_size"]
        self.config = _omni_config(config, hidden)
        self.quantizer = nn.ModuleDict(
            {
                "rvq_first": _Quantiser(config, 1),
                "rvq_rest": _Quantiser(config, config["num_quantizers"] - 1),
            }
        )
        self.pre_conv = Qwen3OmniMoeCausalConvNet(config["codebook_dim"], latent, 3)
        self.pre_transformer = Qwen3OmniMoeCode2WavTransformerModel(self.config)
        self.pre_transformer.input_proj = nn.Linear(latent, hidden)
        self.pre_transformer.output_proj = nn.Linear(hidden, latent)
        waves = Qwen3OmniMoeCode2Wav(_omni_config(config, latent))
        self.upsample = waves.upsample
        self.decoder = waves.decoder


class _Quantiser(nn.Module):
    """A residual quantiser: the sum of one row of each codebook, then a projection."""

    def __init__(self, config: dict[str, Any], n_books: int):
        super().__init__()
        width = config["codebook_dim"]
        # It leads to the codebooks when speech is encoded.
        self.input_proj = nn.Conv1d(width, width // 2, 1, bias=False)
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)
        books = [_Codebook(config["codebook_size"], width // 2) for _ in range(n_books)]
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(books)})

    def tables(self) -> list[Tensor]:
        """[codebook_size, codebook_dim] of each codebook, projected."""
        weight = self.output_proj.weight[..., 0]
        return [book.rows() @ weight.T for book in self.vq["layers"]]


class _Codebook(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self._codebook = nn.ParameterDict(
            {"cluster_usage": torch.empty(size), "embedding_sum": torch.empty(size, width)}
        )

    def rows(self) -> Tensor:
        usage = self._codebook["cluster_usage"].clamp(min=_LEAST_USAGE)
        return self._codebook["embedding_sum"] / usage[:, None]


def _omni_config(config: dict[str, Any], hidden: int) -> Qwen3OmniMoeCode2WavConfig:
    """The same layers in the names of Qwen3-Omni's config, with another width."""
    names = (
        "codebook_size num_quantizers num_hidden_layers num_attention_heads num_key_value_heads "
        "intermediate_size sliding_window rms_norm_eps hidden_act decoder_dim upsample_rates "
        "upsampling_ratios attention_bias layer_scale_initial_scale max_position_embeddings "
        "head_dim"
    )
    known = {name: config[name] for name in names.split() if name in config}
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", 10_000)}
    return Qwen3OmniMoeCode2WavConfig(hidden_size=hidden, rope_parameters=rope, **known)
