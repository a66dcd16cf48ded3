"""A talker as an SGLang model that draws a code of each of several books in every step.

The codes of a step belong to different frames (speech_lm/delay.py). SGLang's vocabulary is that of
all books, one behind the other, so that its logits are those of all heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.engine.steps import all_greedy
from sglang_live.models.speech_lm.sampler import NO_CODE, Sampler, draws_of


class DelayLM(FrameLM):
    """A step's codes are what rows keep, and what is embedded.

    Behind the books a step may have other ids, with tables and heads of the same size; a family
    that has any draws them.
    """

    def __init__(
        self,
        config,
        backbone: nn.Module,
        *,
        delay: Delay,
        text_vocab: int,
        n_voice_rows: int,
        sampler: Sampler,
        excluded: Sequence[int] = (),
        n_others: int = 0,
    ):
        """
        Args:
            config, text_vocab, n_voice_rows: see FrameLM. Its vocabulary is that of all books; its
                eos_token_id is an id of a book that is not the first one.
            excluded: ids of that vocabulary that are never drawn.
            n_others: ids of a step behind those of the books.
            sampler: of every book. Marks are none of its repetitions.
        """
        super().__init__(
            config,
            backbone,
            n_codes=delay.n_books + n_others,
            text_vocab=text_vocab,
            n_voice_rows=n_voice_rows,
            sampler=sampler,
            excluded=excluded,
        )
        self.delay = delay
        self.frame_width, self.frame_lag = delay.n_books, delay.n_books - 1

    def _embed_frames(self, codes: Tensor) -> Tensor:
        """Tables of all books are one, behind each other."""
        size = self.config.vocab_size // self.n_codes
        offset = torch.arange(self.n_codes, device=codes.device) * size
        embeds: Tensor = self.model.embed_tokens(codes + offset).sum(dim=1)
        return embeds

    def _drawn(self, logits: Tensor, hidden: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        history = self._newest(rows, frame)
        logits = (logits.float() + self.allowed).unflatten(1, (self.n_codes, -1))
        codes = self._chosen(logits, rows, frame, history)
        forced = self.delay.forced(frame, self._n_ending(history))
        books, others = codes.tensor_split([self.frame_width], dim=1)
        return torch.cat((torch.where(forced == NO_CODE, books, forced), others), dim=1)

    def _n_ending(self, history: Tensor) -> Tensor:
        """See Delay.forced. history: [n, window, n_codes]."""
        return self.delay.n_ending(history[..., : self.frame_width])

    def _chosen(self, logits: Tensor, rows: Tensor, frame: Tensor, history: Tensor) -> Tensor:
        """[n, n_codes] of logits [n, n_codes, size], each by itself."""
        state, sampler = self.rows, self.sampler
        n, n_codes = logits.shape[:2]
        history = history.masked_fill(history >= self.delay.n_codes, NO_CODE)
        history, logits = history.transpose(1, 2).flatten(0, 1), logits.flatten(0, 1)
        if sampler.repetition is not None:
            penalty = state.penalty[rows].repeat_interleave(n_codes)
            times = sampler.times(history, logits.shape[-1])
            logits = sampler.penalised(logits, times, penalty)
        greedy = state.greedy[rows]
        if all_greedy(greedy):
            return logits.argmax(dim=-1).view(n, n_codes)
        codes = sampler.choose(
            logits,
            state.temperature[rows].repeat_interleave(n_codes),
            greedy.repeat_interleave(n_codes),
            draws_of(state.seed[rows], frame, n_codes).flatten(),
            history,
        )
        return codes.view(n, n_codes)

    def _newest(self, rows: Tensor, frame: Tensor) -> Tensor:
        """[n, window, n_codes], the newest steps."""
        return self._history(rows, frame, max(self.n_codes, self.sampler.window))

    def _completed(self, codes: Tensor, rows: Tensor, frame: Tensor) -> Tensor:
        history = self._newest(rows, frame)[..., : self.frame_width]
        return self.delay.completed(frame, history, codes[:, : self.frame_width])

    def _ends(self, codes: Tensor) -> Tensor:
        return self.delay.ends(codes[:, : self.frame_width])
