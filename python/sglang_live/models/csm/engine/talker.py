"""CSM as an SGLang model: a Llama draws the first code of a frame, and a smaller one, the depth
decoder, the others in the same step."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.llama import LlamaModel
from torch import Tensor
from transformers.models.csm.configuration_csm import CsmDepthDecoderConfig
from transformers.models.csm.modeling_csm import CsmRotaryEmbedding

from sglang_live.models.codecs.mimi import MimiEncoder
from sglang_live.models.csm.decoder import CODEC_PREFIX, load_codec
from sglang_live.models.speech_lm.code_predictor import CodePredictor, traced
from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.engine.steps import all_greedy
from sglang_live.models.speech_lm.engine.weights import (
    lacking,
    load_llama_weight,
    load_predictor_weight,
)
from sglang_live.models.speech_lm.sampler import Sampler
from sglang_live.models.voice_files import read_recording

# Reference settings (generation_config.json of sesame/csm-1b). A request's temperature is for the
# first code of a frame, as in transformers.
TOP_K, DEPTH_TEMPERATURE = 50, 0.9

_AUDIO_EMBEDDINGS = (
    "backbone_model.embed_tokens.embed_audio_tokens.weight",
    "depth_decoder.model.embed_tokens.weight",
)
_CODES = "code_predictor.codec_embedding"
_TEXT_EMBEDDING, _HEADS = "embed_text_tokens.weight", "depth_decoder.codebooks_head.weight"


class CsmBackbone(FrameLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            LlamaModel(config, quant_config, prefix="model"),
            n_codes=config.n_codes,
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(top_k=TOP_K),
            excluded=range(config.codebook_size, config.vocab_size),
        )
        depth = CsmDepthDecoderConfig.from_dict(config.depth)
        self.code_predictor = CodePredictor(
            # Its tables end with the codes, so that no mark is drawn.
            {**config.depth, "num_code_groups": self.n_codes, "vocab_size": config.codebook_size},
            sampler=Sampler(top_k=TOP_K),
            temperature=DEPTH_TEMPERATURE,
            talker_width=config.hidden_size,
            llama_frequencies=CsmRotaryEmbedding(depth).inv_freq,
        )
        self._predict = self.code_predictor.forward

    def _embed_frames(self, codes: Tensor) -> Tensor:
        first: Tensor = self.model.embed_tokens(codes[:, 0])
        return first + self.code_predictor.embed_frames(codes[:, 1:])

    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        # A captured graph records operators, which the traced predictor does not show.
        predict = self.code_predictor if get_is_capture_mode() else self._predict
        drawn = None if all_greedy(greedy) else draws
        codes: Tensor = predict(hidden, self.model.embed_tokens(first), greedy, drawn)[0]
        return codes

    def _ends(self, codes: Tensor) -> Tensor:
        return (codes[:, :-1] == self.config.codebook_eos_token_id).all(dim=1)

    # --- weights ---

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params = dict(self.named_parameters())
        known, loaded = {*params, _TEXT_EMBEDDING}, Counter[str]()
        for name, tensor in weights:
            if name.startswith(CODEC_PREFIX):
                continue  # for the vocoder
            if name in _AUDIO_EMBEDDINGS:
                targets = self._load_codes(tensor, is_first=not loaded[_CODES])
            elif name == _TEXT_EMBEDDING:
                self.text_table.copy_(tensor)
                targets = [name]
            elif name == _HEADS:
                heads = tensor[..., : self.config.codebook_size]
                self.code_predictor.lm_head.copy_(heads.transpose(1, 2))
                targets = ["code_predictor.lm_head"]
            else:
                targets = [self._load(params, name, tensor)]
            if not known.issuperset(targets):
                raise ValueError(f"unknown weight {name} of CSM")
            loaded.update(targets)
        if names := lacking(known, loaded):
            raise ValueError(f"checkpoint lacks weights of CSM: {names[:8]}")
        self.code_predictor.prepare()
        if self.codec_head.weight.device.type == "cpu":
            self._predict = traced(self.code_predictor)
        self._fill_voices()
        self.prepare()

    def _load_codes(self, tables: Tensor, *, is_first: bool) -> list[str]:
        """The table of backbone and depth decoder, [n_codes * vocab, hidden].

        A checkpoint may have it once, or for each of them.
        """
        books = tables.view(self.n_codes, self.config.vocab_size, -1)
        residual = books[1:, : self.config.codebook_size]
        own = self.code_predictor.codec_embedding
        if is_first:
            first = self.model.embed_tokens.weight
            getattr(first, "weight_loader", default_weight_loader)(first, books[0])
            own.copy_(residual)
        elif not torch.equal(own, residual.to(own.device, own.dtype)):
            raise ValueError("a CSM whose codebooks' embeddings differ is not served")
        return ["model.embed_tokens.weight", _CODES]

    def _load(self, params: dict[str, Tensor], name: str, tensor: Tensor) -> str:
        """Copy one tensor into its parameter. Returns the parameter's name."""
        if name.startswith("depth_decoder."):
            name = name.replace("inputs_embeds_projector", "small_to_mtp_projection")
            name = name.replace("depth_decoder.", "code_predictor.")
            return load_predictor_weight(self.code_predictor, params, name, tensor)
        name = name.replace("backbone_model.", "model.").replace("lm_head.", "codec_head.")
        return load_llama_weight(params, name, tensor)

    def _fill_voices(self) -> None:
        """The frames of the recordings, each with one behind it that ends it."""
        files = [Path(file) for file in self.config.live_recordings]
        if not files:
            return
        encoder = MimiEncoder(load_codec(Path(self.config.live_checkpoint)))
        end = torch.full((1, self.n_codes), self.config.codebook_eos_token_id)
        found = []
        for file in files:
            samples = torch.from_numpy(read_recording(file, encoder.sample_rate_hz))
            rest = -len(samples) % encoder.samples_per_frame
            codes = encoder.encode([encoder.new_stream()], F.pad(samples, (0, rest))[None])
            found += [codes[0], end]
        device = self.voices.device
        self.voices.copy_(self._embed_frames(torch.cat(found).to(device)))


EntryClass = CsmBackbone
