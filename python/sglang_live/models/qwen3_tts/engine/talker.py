"""The Qwen3-TTS talker as an SGLang model: dense Qwen3 layers under a speaking language model."""

from collections.abc import Iterable
from pathlib import Path

import torch
from sglang.srt.models.qwen3 import Qwen3Model
from torch import Tensor

from sglang_live.models.host_copy import copy_to
from sglang_live.models.qwen3_tts.speaker import embeddings_of
from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.engine.talker import SpeechLM
from sglang_live.models.speech_lm.engine.weights import WeightNames, load_talker_weights
from sglang_live.models.speech_lm.sampler import Repetition, Sampler
from sglang_live.models.speech_lm.talker_state import TalkerStream

# Defaults of the reference (qwen_tts, Qwen3TTSForConditionalGeneration.generate).
TOP_K, PREDICTOR_TEMPERATURE = 50, 0.9
N_CONTROL_IDS = 1024
NAMES = WeightNames(
    embedding="talker.model.text_embedding.weight",
    renamed=(("model.codec_embedding.", "model.embed_tokens."),),
    stacked=(("mlp.gate_proj", "mlp.gate_up_proj", 0), ("mlp.up_proj", "mlp.gate_up_proj", 1)),
)


class Qwen3TTSTalker(SpeechLM):
    min_frames = 2  # fixed in the reference

    def __init__(self, config, quant_config=None, prefix: str = ""):
        talker = config.talker
        super().__init__(
            config,
            Qwen3Model(config, quant_config, prefix="model"),
            CodePredictor(
                talker["code_predictor_config"],
                sampler=Sampler(top_k=TOP_K),
                temperature=PREDICTOR_TEMPERATURE,
                talker_width=config.hidden_size,
            ),
            sampler=Sampler(top_k=TOP_K, repetition=Repetition()),
            n_control_ids=N_CONTROL_IDS,
            text_vocab=talker["text_vocab_size"],
            text_widths=(talker["text_hidden_size"], talker["text_hidden_size"]),
        )

        # By number of the voice, filled when weights load.
        cloned = torch.zeros(len(config.live_recordings), config.hidden_size)
        self.register_buffer("cloned", cloned, persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.prepare(load_talker_weights(self, weights, NAMES))
        if recordings := self.config.live_recordings:
            checkpoint = Path(self.config.live_checkpoint)
            self.cloned.copy_(embeddings_of(checkpoint, [Path(file) for file in recordings]))

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        embeds = super()._embed_prompt(ids)
        if not len(self.cloned):
            return embeds
        row = ids - self.ids.audio
        is_cloned = (row >= 0) & (row < len(self.cloned))
        speakers = self.cloned[torch.where(is_cloned, row, 0)]
        return torch.where(is_cloned.unsqueeze(1), speakers + self._pad, embeds)

    def _place_audio(self, out: Tensor, stream: TalkerStream, prefix: int) -> None:
        """Write the speaker that the prompt brings along to its place, if it is in this chunk."""
        if (found := stream.audio_in(prefix, prefix + len(out))) is not None:
            speakers, at = found
            states = copy_to(speakers, out.device, out.dtype)
            out[copy_to(at, out.device)] = states + self._pad

    @property
    def _pad(self) -> Tensor:
        pad: Tensor = self.text_table[self.config.talker["tts_pad_token_id"]]
        return pad


EntryClass = Qwen3TTSTalker
