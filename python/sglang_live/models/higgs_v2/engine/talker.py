"""Higgs Audio v2 as an SGLang model: a Llama whose layers have norms and an FFN of their own for
audio."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaMLP
from torch import Tensor, nn

from sglang_live.models.higgs_v2.encoder import HiggsEncoder
from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.speech_lm.engine.delay_lm import DelayLM
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.speech_lm.sampler import Redraw, Sampler
from sglang_live.models.voice_files import read_recording

# Reference settings (generation_config.json, and boson-ai/higgs-audio, examples/generation.py).
TOP_K, TOP_P = 50, 0.95
RAS_WINDOW, RAS_LEAST = 7, 2

_TEXT_EMBEDDING = "model.embed_tokens.weight"
_RENAMED = {
    "model.embed_audio_tokens.embed_audio_tokens.weight": "model.embed_tokens.weight",
    "audio_lm_head.weight": "codec_head.weight",
}


class HiggsLayer(LlamaDecoderLayer):
    def __init__(self, config, layer_id: int, quant_config, prefix: str):
        super().__init__(config, layer_id, 0, quant_config, prefix, stage_boundaries=False)
        self.audio_mlp = LlamaMLP(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            quant_config,
            f"{prefix}.audio_mlp",
        )
        self.audio_input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.audio_post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, positions, hidden, forward_batch, is_audio: Tensor | None) -> Tensor:
        """is_audio: [n, 1] bool; None: all positions are."""
        normed = self._either(is_audio, hidden, self.audio_input_layernorm, self.input_layernorm)
        hidden = hidden + self.self_attn(positions, normed, forward_batch)
        return hidden + self._either(is_audio, hidden, self._of_audio, self._of_text)

    def _of_audio(self, hidden: Tensor) -> Tensor:
        fed: Tensor = self.audio_mlp(self.audio_post_attention_layernorm(hidden))
        return fed

    def _of_text(self, hidden: Tensor) -> Tensor:
        fed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return fed

    @staticmethod
    def _either(is_audio: Tensor | None, hidden: Tensor, of_audio, of_text) -> Tensor:
        """A prompt has both: to find the rows of each would wait for the device."""
        audio: Tensor = of_audio(hidden)
        return audio if is_audio is None else torch.where(is_audio, audio, of_text(hidden))


class HiggsModel(nn.Module):
    """embed_tokens: of all books, behind each other."""

    def __init__(self, config, quant_config):
        super().__init__()
        self._text_ids = range(config.vocab_size, config.vocab_size + config.text_vocab_size)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            HiggsLayer(config, n, quant_config, f"model.layers.{n}")
            for n in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, positions, forward_batch, hidden: Tensor) -> Tensor:
        is_audio = None
        if not forward_batch.forward_mode.is_decode():
            text = (input_ids >= self._text_ids.start) & (input_ids < self._text_ids.stop)
            is_audio = ~text.unsqueeze(1)
        for layer in self.layers:
            hidden = layer(positions, hidden, forward_batch, is_audio)
        normed: Tensor = self.norm(hidden)
        return normed


class HiggsBackbone(DelayLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            HiggsModel(config, quant_config),
            delay=Delay(
                n_books=config.num_codebooks,
                n_codes=config.live_codes,
                begin_id=config.audio_stream_bos_id,
                end_id=config.audio_stream_eos_id,
            ),
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(
                top_k=TOP_K,
                top_p=TOP_P,
                redraw=Redraw(window=RAS_WINDOW, least=RAS_LEAST, excludes=False),
            ),
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params = dict(self.named_parameters())
        known, loaded = {*params, "text_table"}, Counter[str]()
        for name, tensor in weights:
            target = self._load(params, name, tensor)
            if target not in known:
                raise ValueError(f"unknown weight {name} of Higgs Audio v2")
            loaded[target] += 1
        if names := lacking(known, loaded):
            raise ValueError(f"checkpoint lacks weights of Higgs Audio v2: {names[:8]}")
        self._fill_voices()
        self.prepare()

    def _fill_voices(self) -> None:
        """The frame of marks with which every stream begins, and the steps of the recordings."""
        steps = [torch.full((1, self.n_codes), self.delay.begin_id, device="cpu")]
        if files := self.config.live_recordings:
            encoder = HiggsEncoder(Path(self.config.live_checkpoint))
            for file in files:
                samples = torch.from_numpy(read_recording(Path(file), encoder.sample_rate_hz))
                whole = len(samples) // encoder.samples_per_frame * encoder.samples_per_frame
                steps.append(self.delay.steps(encoder.encode(samples[:whole])))
        self.voices.copy_(self._embed_frames(torch.cat(steps).to(self.voices.device)))

    def _load(self, params: dict[str, Tensor], name: str, tensor: Tensor) -> str:
        """Copy one tensor into its place. Returns the name of that."""
        if name == _TEXT_EMBEDDING:
            self.text_table.copy_(tensor)
            return "text_table"
        return load_llama_weight(params, _RENAMED.get(name, name), tensor)


EntryClass = HiggsBackbone
