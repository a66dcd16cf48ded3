"""T3 of Chatterbox, restated in PyTorch.

Source: resemble-ai/chatterbox (models/t3/t3.py, modules/), whose package pins another PyTorch.
Written for clarity: one text, both prompts as a batch. Draws take the likeliest code, or that which
noise of a Gumbel distribution chooses, which is as probable as in a multinomial draw.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from test.noise import Noise

BEGIN, END, N_CODES = 6561, 6562, 6561


class T3(nn.Module):
    """Names as in the published checkpoint; sizes as of the config."""

    def __init__(self, config: LlamaConfig, sizes: dict[str, int]):
        super().__init__()
        width = config.hidden_size
        self.tfmr = LlamaModel(config)
        self.cond_enc = nn.Module()
        self.cond_enc.spkr_enc = nn.Linear(sizes["speaker"], width)
        self.cond_enc.emotion_adv_fc = nn.Linear(1, width, bias=False)
        self.cond_enc.perceiver = _Perceiver(sizes["queries"], width)
        self.text_emb = nn.Embedding(sizes["text"], width)
        self.speech_emb = nn.Embedding(sizes["speech"], width)
        for name in ("text", "speech"):
            places = nn.Module()
            places.emb = nn.Embedding(sizes[f"{name}_places"], width)
            setattr(self, f"{name}_pos_emb", places)
        self.text_head = nn.Linear(width, sizes["text"], bias=False)
        self.speech_head = nn.Linear(width, sizes["speech"], bias=False)

    def conditioning(self, voice: dict[str, Tensor]) -> Tensor:
        """[n_rows, width]."""
        codes = voice["cond_prompt_speech_tokens"][0]
        heard = self.speech_emb(codes) + self.speech_pos_emb.emb.weight[: len(codes)]
        return torch.cat(
            [
                self.cond_enc.spkr_enc(voice["speaker_emb"]),
                self.cond_enc.perceiver(heard[None])[0],
                self.cond_enc.emotion_adv_fc(voice["emotion_adv"].view(1, 1)),
            ]
        )

    @torch.no_grad()
    def inference(
        self,
        voice: dict[str, Tensor],
        text: list[int],
        most: int,
        *,
        noise: Noise | None = None,
        weight: float = 0.5,
        penalty: float = 1.2,
        temperature: float = 0.8,
        min_p: float = 0.05,
    ) -> list[int]:
        """Codes up to the end. noise: None: the likeliest ones.

        Marks but the end are not drawn; the reference leaves them out of the sound.
        """
        embeds = torch.stack([self.text_emb(torch.tensor(text))] * 2)
        embeds[1].zero_()
        embeds = embeds + self.text_pos_emb.emb.weight[: len(text)]
        begin = self.speech_emb.weight[BEGIN] + self.speech_pos_emb.emb.weight[0]
        rows = self.conditioning(voice).expand(2, -1, -1)
        inputs = torch.cat((rows, embeds, begin.expand(2, 2, -1)), dim=1)
        past, codes = None, [BEGIN]
        while len(codes) <= most:
            output = self.tfmr(inputs_embeds=inputs, past_key_values=past, use_cache=True)
            past = output.past_key_values
            told, untold = self.speech_head(output.last_hidden_state[:, -1])
            logits = told + weight * (told - untold)
            logits[N_CODES:END] = logits[END + 1 :] = -torch.inf
            seen = torch.tensor(codes)
            scores = logits[seen]
            logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
            if noise is not None:
                logits = logits / temperature
                shares = logits.softmax(dim=0)
                logits = logits.masked_fill(shares < min_p * shares.max(), -torch.inf)
                logits = logits + noise(len(codes) - 1, len(logits))[0]
            code = int(logits.argmax())
            if code == END:
                break
            inputs = self.speech_emb.weight[code] + self.speech_pos_emb.emb.weight[len(codes)]
            inputs = inputs.expand(2, 1, -1)
            codes.append(code)
        return codes[1:]


class _Perceiver(nn.Module):
    def __init__(self, n_queries: int, width: int, n_heads: int = 4):
        super().__init__()
        self._n_heads = n_heads
        self.pre_attention_query = nn.Parameter(torch.zeros(1, n_queries, width))
        self.attn = nn.Module()
        self.attn.norm = nn.LayerNorm(width)
        for name in ("to_q", "to_k", "to_v", "proj_out"):
            setattr(self.attn, name, nn.Linear(width, width))

    def forward(self, heard: Tensor) -> Tensor:
        seen = self._block(self.pre_attention_query, heard)
        return self._block(seen, seen)

    def _block(self, x: Tensor, y: Tensor) -> Tensor:
        of = self.attn
        found = []
        parts = of.to_q(of.norm(x)), of.to_k(of.norm(y)), of.to_v(of.norm(y))
        for query, key, value in zip(*(p.chunk(self._n_heads, dim=2) for p in parts), strict=True):
            similar = query @ key.transpose(1, 2) * query.shape[2] ** -0.5
            found.append(F.softmax(similar, dim=2) @ value)
        return x + of.proj_out(torch.cat(found, dim=2))
