from sglang.srt.models.llama import LlamaModel

from sglang_live.models.speech_lm.engine.delay_lm import DelayLM
from sglang_live.models.speech_lm.sampler import Sampler
from test.toys.counting import LETTERS
from test.toys.delay import DELAY
from test.toys.engine.weights import load


class ToyDelay(DelayLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            LlamaModel(config, quant_config, prefix="model"),
            delay=DELAY,
            text_vocab=len(LETTERS),
            n_voice_rows=0,
            sampler=Sampler(),
        )

    def load_weights(self, weights) -> None:
        load(self, weights)
        self.prepare()


EntryClass = ToyDelay
