"""The language models of CosyVoice 2 and 3, restated in PyTorch.

Source: FunAudioLLM/CosyVoice (cosyvoice/llm/llm.py, utils/common.py), which has no package. Written
for clarity: one text. Draws take the likeliest code, or that which noise of a Gumbel distribution
chooses, which is as probable as in a multinomial draw.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from test.noise import Noise

N_CODES = 6561


class CosyVoiceLM(nn.Module):
    """Names as in the published checkpoint.

    n_redrawn: codes that repetition-aware sampling has drawn again.
    """

    def __init__(self, config: Qwen2Config, version: int):
        super().__init__()
        self._version, width = version, config.hidden_size
        self.llm = nn.Module()
        self.llm.model = Qwen2ForCausalLM(config)
        n_ids = N_CODES + (3 if version == 2 else 200)
        if version == 2:
            self.llm_embedding = nn.Embedding(2, width)
        self.llm_decoder = nn.Linear(width, n_ids, bias=version == 2)
        self.speech_embedding = nn.Embedding(n_ids, width)
        self.n_redrawn = 0

    @torch.no_grad()
    def inference(
        self,
        text: list[int],
        prompt_text: list[int],
        prompt_codes: list[int],
        most: int,
        *,
        noise: Noise | None = None,
    ) -> list[int]:
        """Codes up to the end. noise: None: the likeliest ones."""
        words = self.llm.model.model.embed_tokens(torch.tensor([*prompt_text, *text]))
        if self._version == 2:
            begin, task = self.llm_embedding.weight
        else:
            begin, task = self.speech_embedding.weight[[N_CODES, N_CODES + 2]]
        heard = self.speech_embedding(torch.tensor(prompt_codes, dtype=torch.int64))
        inputs = torch.cat((begin[None], words, task[None], heard))[None]
        past, codes = None, list[int]()
        while len(codes) < most:
            output = self.llm.model.model(inputs_embeds=inputs, past_key_values=past)
            past = output.past_key_values
            scores = self.llm_decoder(output.last_hidden_state[0, -1]).log_softmax(dim=0)
            if len(codes) < 2 * len(text):
                scores[N_CODES] = -torch.inf
            if noise is None:
                code = int(scores.argmax())
            else:
                code = self._drawn(scores, codes, *noise(len(codes), len(scores)))
            if code >= N_CODES:
                break
            codes.append(code)
            inputs = self.speech_embedding.weight[code][None, None]
        return codes

    def _drawn(self, scores: Tensor, codes: list[int], first: Tensor, second: Tensor) -> int:
        """ras_sampling."""
        code = nucleus(scores, first)
        if codes[-10:].count(code) >= 10 * 0.1:
            self.n_redrawn += 1
            scores[code] = -torch.inf
            code = int((scores.log_softmax(dim=0) + second).argmax())
        return code


def nucleus(scores: Tensor, noise: Tensor, top_p: float = 0.8, top_k: int = 25) -> int:
    mass, found = 0.0, list[int]()
    shares, order = scores.softmax(dim=0).sort(descending=True, stable=True)
    for share, code in zip(shares.tolist(), order.tolist(), strict=True):
        if mass >= top_p or len(found) >= top_k:
            break
        mass += share
        found.append(code)
    kept = torch.tensor(found)
    return found[int((scores[kept] + noise[kept]).argmax())]
