"""The language model of CosyVoice 2 and 3 as an SGLang model: a Qwen2 with embeddings and a head of
its own for codes.

In a prompt, ids below the number of codes are those of a voice's recording.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from sglang.srt.models.qwen2 import Qwen2Model
from torch import Tensor

from sglang_live.models.cosyvoice.family import N_CODES, RATIO
from sglang_live.models.speech_lm.engine.mixed_lm import MixedLM
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.speech_lm.sampler import Redraw, Sampler

# Reference settings (ras_sampling in cosyvoice2.yaml): a code that is among the last ten.
TOP_K, TOP_P, WINDOW = 25, 0.8, 10

_RENAMED = (
    ("llm.model.model.", "model."),
    ("speech_embedding.", "model.embed_tokens."),
    ("llm_decoder.weight", "codec_head.weight"),
)
_TEXT = "llm.model.model.embed_tokens.weight"
_MARKS, _BIAS = "llm_embedding.weight", "llm_decoder.bias"
_UNUSED = "llm.model.lm_head.weight"


class CosyVoiceLM(MixedLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            Qwen2Model(config, quant_config, prefix="model"),
            n_codes=N_CODES,
            ratio=RATIO,
            fill_id=config.fill_id,
            end_id=config.eos_token_id,
            task_id=config.task_id,
            again_id=config.again_id,
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(
                top_k=TOP_K,
                top_p=TOP_P,
                of_all=True,
                redraw=Redraw(window=WINDOW, least=1, excludes=True),
            ),
            excluded=(),
            late=[config.late_id],
        )

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        is_code = ids < N_CODES
        codes = self.model.embed_tokens(ids.clamp(max=N_CODES - 1))
        return torch.where(is_code.unsqueeze(1), codes, super()._embed_prompt(ids))

    # --- weights ---

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params, config = dict(self.named_parameters()), self.config
        # Version 3 has its marks among the codes, and a head without a bias.
        own = {_TEXT: self.text_table}
        if config.prompt_ids is None:
            own |= {_MARKS: self.voices, _BIAS: self.allowed}
        known, loaded = {*params, *own}, Counter[str]()
        for name, tensor in weights:
            if name == _UNUSED:
                continue
            if name in own:
                own[name].copy_(tensor)
                target = name
            else:
                if name == "speech_embedding.weight" and config.prompt_ids is not None:
                    self.voices.copy_(tensor[config.prompt_ids])
                target = name
                for old, new in _RENAMED:
                    target = target.replace(old, new)
                target = load_llama_weight(params, target, tensor)
            if target not in known:
                raise ValueError(f"unknown weight {name} of CosyVoice")
            loaded[target] += 1
        if names := lacking(known, loaded):
            raise ValueError(f"checkpoint lacks weights of CosyVoice: {names[:8]}")
        self.prepare()


EntryClass = CosyVoiceLM
