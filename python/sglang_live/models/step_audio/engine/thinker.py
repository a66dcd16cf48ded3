"""Step-Audio 2 mini as an SGLang model: a Qwen2, and the encoder through which it hears.

The clips of a batch are encoded one by one, because a clip that is padded to the length of another
has another sound. SGLang has a list of the classes that hear: this one has the name of one in it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.managers.mm_utils import general_mm_embed_routine, pad_mm_tokens
from sglang.srt.managers.schedule_batch import Modality
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from torch import Tensor, nn

from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.step_audio.hearing import Hearing

_LANGUAGE = "model.", "lm_head."


class Qwen2AudioForConditionalGeneration(nn.Module):
    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.language_model = Qwen2ForCausalLM(config, quant_config)
        self.hearing = Hearing(config.audio_encoder_config)

    def pad_input_ids(self, input_ids: Any, mm_inputs: Any) -> Any:
        return pad_mm_tokens(input_ids, mm_inputs)

    def get_audio_feature(self, items: list[Any]) -> Tensor:
        """[n_tokens, width] of clips."""
        weight = self.hearing.encoder.conv1.weight
        return torch.cat(
            [self.hearing(copy_to(item.feature, weight.device, weight.dtype)) for item in items]
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, **kwargs: Any
    ) -> Any:
        return general_mm_embed_routine(
            input_ids=input_ids,
            forward_batch=forward_batch,
            language_model=self.language_model,
            data_embedding_funcs={Modality.AUDIO: self.get_audio_feature},
            positions=positions,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params, loaded = dict(self.named_parameters()), Counter[str]()
        for name, tensor in weights:
            room = "language_model" if name.startswith(_LANGUAGE) else "hearing"
            target = load_llama_weight(params, f"{room}.{name}", tensor)
            if target not in params:
                raise ValueError(f"unknown weight {name} of Step-Audio")
            loaded[target] += 1
        if names := lacking(params, loaded):
            raise ValueError(f"checkpoint lacks weights of Step-Audio: {names[:8]}")


EntryClass = Qwen2AudioForConditionalGeneration
