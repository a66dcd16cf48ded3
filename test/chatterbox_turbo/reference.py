"""T3 of Chatterbox Turbo, restated in PyTorch.

Source: resemble-ai/chatterbox (models/t3/t3.py: inference_turbo, modules/cond_enc.py). Written for
clarity: one text. Draws take the likeliest code, or that which noise of a Gumbel distribution
chooses, which is as probable as in a multinomial draw.
"""

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2Model,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from test.noise import Noise

BEGIN, END, N_CODES, N_IDS = 6561, 6562, 6561, 6563


class T3(nn.Module):
    """Names as in the published checkpoint; sizes as of the config."""

    def __init__(self, config: GPT2Config, n_speaker: int, n_text: int):
        super().__init__()
        width = config.hidden_size
        self.tfmr = GPT2Model(config)
        self.cond_enc = nn.Module()
        self.cond_enc.spkr_enc = nn.Linear(n_speaker, width)
        self.text_emb = nn.Embedding(n_text, width)
        self.speech_emb = nn.Embedding(N_IDS, width)
        self.text_head = nn.Linear(width, n_text, bias=False)
        self.speech_head = nn.Linear(width, N_IDS)

    @torch.no_grad()
    def inference(
        self,
        voice: dict[str, Tensor],
        text: list[int],
        most: int,
        *,
        noise: Noise | None = None,
        temperature: float = 0.8,
        top_k: int = 1000,
        top_p: float = 0.95,
        penalty: float = 1.2,
    ) -> list[int]:
        """Codes up to the end. noise: None: the likeliest ones.

        The mark of the begin is not drawn; the reference leaves it out of the sound.
        """
        cut = TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)
        penalised = RepetitionPenaltyLogitsProcessor(penalty)
        inputs = torch.cat(
            (
                self.cond_enc.spkr_enc(voice["speaker_emb"]),
                self.speech_emb(voice["cond_prompt_speech_tokens"][0]),
                self.text_emb(torch.tensor(text)),
                self.speech_emb.weight[BEGIN][None],
            )
        )[None]
        past, codes = None, []
        while len(codes) < most:
            output = self.tfmr(inputs_embeds=inputs, past_key_values=past, use_cache=True)
            past = output.past_key_values
            scores = self.speech_head(output.last_hidden_state[:, -1])
            scores[:, BEGIN] = -torch.inf
            seen = torch.tensor([codes or [BEGIN]])
            for step in (*(cut if noise is not None else ()), penalised):
                scores = step(seen, scores)
            if noise is not None:
                scores = scores + noise(len(codes), N_IDS)[0]
            code = int(scores.argmax())
            if code == END:
                break
            codes.append(code)
            inputs = self.speech_emb.weight[code][None, None]
        return codes
