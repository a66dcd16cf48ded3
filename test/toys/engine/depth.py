import torch
from sglang.srt.models.llama import LlamaModel
from torch import Tensor, nn

from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.sampler import Sampler
from test.toys.counting import END_CODE, LETTERS, N_CODES
from test.toys.depth import N_BOOKS
from test.toys.engine.weights import load


class ToyDepth(FrameLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            LlamaModel(config, quant_config, prefix="model"),
            n_codes=N_BOOKS,
            text_vocab=len(LETTERS),
            n_voice_rows=0,
            sampler=Sampler(),
            excluded=[config.eos_token_id],
        )
        self.depth = nn.Parameter(torch.empty(N_BOOKS - 1, N_CODES, N_CODES))

    def _embed_frames(self, codes: Tensor) -> Tensor:
        embeds: Tensor = self.model.embed_tokens(codes[:, 0])
        return embeds

    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        codes = [first]
        for weight in self.depth:
            codes.append(weight[codes[-1]].argmax(dim=-1))
        return torch.stack(codes[1:], dim=1)

    def _ends(self, codes: Tensor) -> Tensor:
        return codes[:, 0] == END_CODE

    def load_weights(self, weights) -> None:
        load(self, weights)
        self.prepare()


EntryClass = ToyDepth
