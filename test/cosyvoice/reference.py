"""The language models of CosyVoice 2 and 3, restated in PyTorch.

Source: FunAudioLLM/CosyVoice (cosyvoice/llm/llm.py, utils/common.py), which has no package. Written
for clarity: one text. Draws take the likeliest code, or that which noise of a Gumbel distribution
chooses, which is as probable as in a multinomial draw.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from test.noise import Noise

N_CODES = 6561


class CosyVoiceLM(nn.Module):
    """Names as in the published checkpoint.

    n_redrawn: codes that repetition-aware sampling has drawn again.
    n_fills, n_early: fill tokens, and those of them that were drawn before they were due.
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
        self.n_redrawn = self.n_fills = self.n_early = 0

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
        begin, task = self._marks()
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

    @torch.no_grad()
    def inference_bistream(
        self,
        chunks: Iterable[list[int]],
        prompt_text: list[int],
        prompt_codes: list[int],
        *,
        instruction: Sequence[int] = (),
        noise: Noise | None = None,
    ) -> list[int]:
        """Codes of a text that comes in chunks, before each of which those before it are spoken.

        Marks that the published one fails at are not drawn. noise: by rows of input behind the
        first ones.
        """
        words = self.llm.model.model.embed_tokens
        fill, end = N_CODES + self._version, N_CODES + (self._version == 3)
        begin, task = self._marks()
        state = _Rows(self)
        rows = torch.cat((begin[None], words(torch.tensor(instruction, dtype=torch.int64))))
        n_head = len(rows)
        text = words(torch.tensor(prompt_text, dtype=torch.int64))
        heard = self.speech_embedding(torch.tensor(prompt_codes, dtype=torch.int64))
        next_fill = (len(heard) // 15 + 1) * 15 - len(heard)
        drawn = list[int]()
        for chunk in chunks:
            text = torch.cat((text, words(torch.tensor(chunk, dtype=torch.int64))))
            while len(heard) and len(text) >= 5:
                rows = torch.cat((rows, text[:5], heard[:15]))
                text, heard = text[5:], heard[15:]
            if len(heard):
                continue
            if drawn[-1:] == [fill] or (not drawn and len(rows) == n_head):
                if len(text) < 5:
                    continue
                rows = text[:5] if drawn else torch.cat((rows, text[:5]))
                text = text[5:]
            while True:
                scores = state.scores(rows)
                if len(drawn) == next_fill:
                    code = fill
                else:
                    code = self._drawn_but(scores, drawn, fill, noise, state.n_behind)
                drawn.append(code)
                if code == fill:
                    self.n_fills += 1
                    self.n_early += len(drawn) <= next_fill
                    next_fill = len(drawn) + 15
                    break
                rows = self.speech_embedding.weight[code][None]
        rows = torch.cat((rows, text, task[None]))
        while True:
            scores = state.scores(rows)
            code = self._drawn_but(scores, drawn, end, noise, state.n_behind)
            if code == end:
                return [code for code in drawn if code != fill]
            drawn.append(code)
            rows = self.speech_embedding.weight[code][None]

    def _marks(self) -> Tensor:
        if self._version == 2:
            return self.llm_embedding.weight
        return self.speech_embedding.weight[[N_CODES, N_CODES + 2]]

    def _drawn_but(
        self, scores: Tensor, drawn: list[int], mark: int, noise: Noise | None, n_behind: int
    ) -> int:
        """A code, or the only mark that is drawn."""
        kept = scores[mark].clone()
        scores[N_CODES:] = -torch.inf
        scores[mark] = kept
        if noise is None:
            return int(scores.argmax())
        return self._drawn(scores, drawn, *noise(n_behind, len(scores)))

    def _drawn(self, scores: Tensor, codes: list[int], first: Tensor, second: Tensor) -> int:
        """ras_sampling."""
        code = nucleus(scores, first)
        if codes[-10:].count(code) >= 10 * 0.1:
            self.n_redrawn += 1
            scores[code] = -torch.inf
            code = int((scores.log_softmax(dim=0) + second).argmax())
        return code


class _Rows:
    """n_behind: rows behind the first ones."""

    def __init__(self, model: CosyVoiceLM):
        self._model, self._past = model, None
        self.n_behind = 0

    def scores(self, rows: Tensor) -> Tensor:
        self.n_behind += len(rows) if self._past is not None else 0
        model = self._model
        output = model.llm.model.model(inputs_embeds=rows[None], past_key_values=self._past)
        self._past = output.past_key_values
        return model.llm_decoder(output.last_hidden_state[0, -1]).log_softmax(dim=0)


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
