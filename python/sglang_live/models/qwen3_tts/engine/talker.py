"""The Qwen3-TTS talker as an SGLang model: dense Qwen3 layers under a speaking language model."""

from collections.abc import Iterable

from sglang.srt.models.qwen3 import Qwen3Model
from torch import Tensor

from sglang_live.models.speech_lm.code_predictor import CodePredictor
from sglang_live.models.speech_lm.engine.talker import SpeechLM
from sglang_live.models.speech_lm.engine.weights import WeightNames, load_talker_weights

# Defaults of the reference (qwen_tts, Qwen3TTSForConditionalGeneration.generate).
PREDICTOR_TOP_P, PREDICTOR_TEMPERATURE = 1.0, 0.9
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
                top_p=PREDICTOR_TOP_P,
                temperature=PREDICTOR_TEMPERATURE,
                talker_width=config.hidden_size,
            ),
            text_vocab=talker["text_vocab_size"],
            text_widths=(talker["text_hidden_size"], talker["text_hidden_size"]),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.prepare(load_talker_weights(self, weights, NAMES))


EntryClass = Qwen3TTSTalker
