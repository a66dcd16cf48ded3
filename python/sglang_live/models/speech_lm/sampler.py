"""How a talker draws codes; a family configures one Sampler for each of its kinds of codebook.

The Gumbel noise is by seed, frame, step and id, independent of the other requests of a batch. It
belongs to an id, not to the id's rank among the candidates: when KV is computed again, two nearly
equal candidates can change ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Entries of the table. A draw reads consecutive entries, one per id. Two draws have the same start
# with a probability of 1 / TABLE_SIZE.
TABLE_SIZE = 1 << 20
# In a history: no code yet.
NO_CODE = -1


def draws_of(seed: Tensor, frame: Tensor, n_steps: int) -> Tensor:
    """Start indices in the table of a frame's steps.

    Args:
        seed: [n] int64 per stream.
        frame: [n] int64 frame index.
    Returns:
        [n, n_steps] int64.
    """
    step = torch.arange(n_steps, device=seed.device, dtype=torch.int64)
    x = (seed * 0x1000003 + frame).unsqueeze(1) * 0x9E3779B97F4A7C1 + step * 0xBF58476D1CE4E5B
    return _mixed(x) & (TABLE_SIZE - 1)


class GumbelTable(nn.Module):
    """4 MiB of noise, the same in every process."""

    def __init__(self) -> None:
        super().__init__()
        uniform = ((_mixed(torch.arange(TABLE_SIZE)) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
        gumbel = -torch.log(-torch.log(uniform.clamp(1e-15, 1 - 1e-15)))
        self.register_buffer("table", gumbel.float(), persistent=False)

    def forward(self, draw: Tensor, ids: Tensor) -> Tensor:
        """draw: [n] of `draws_of`; ids: [n, k] candidates. Returns [n, k] float32."""
        return self.table[(draw.unsqueeze(1) + ids) & (TABLE_SIZE - 1)]


def _mixed(x: Tensor) -> Tensor:
    """Counter-based random 64-bit numbers: splitmix64 (Steele et al., OOPSLA 2014)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # int64 shifts are arithmetic: mask the copies of the sign bit away.
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Which codes a repetition penalty is for; how large it is belongs to a request.

    Attributes:
        window: of the newest codes. 0: all codes of the response.
        product: once for every occurrence in the window, instead of once.
    """

    window: int = 0
    product: bool = False

    def __post_init__(self) -> None:
        if self.product and not self.window:
            raise ValueError("occurrences are counted in a window")


@dataclass(frozen=True, slots=True, kw_only=True)
class Redraw:
    """Repetition-aware sampling: what was drawn too often of late is drawn again.

    The second draw is from the whole distribution at temperature 1, without top-k, top-p and min-p.

    Attributes:
        window: of the newest codes.
        least: occurrences in it from which on the code is drawn again.
        excludes: whether the second draw cannot be the same code.
    """

    window: int
    least: int
    excludes: bool


class Sampler(nn.Module):
    """
    Attributes:
        window: codes that a history must have at least; 0: none is needed.
    """

    def __init__(
        self,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        of_all: bool = False,
        min_p: float = 0.0,
        repetition: Repetition | None = None,
        redraw: Redraw | None = None,
        penalised_last: bool = False,
    ):
        """
        Args:
            top_k: most candidates; 0: all codes.
            top_p: of the candidates' mass, from the likeliest on.
            of_all: top_p is of the mass of all codes instead.
            min_p: least share of the likeliest candidate's probability.
            penalised_last: candidates are chosen before the repetition penalty (truncated).
        """
        super().__init__()
        self._top_k, self._top_p, self._min_p = top_k, top_p, min_p
        self._of_all = of_all
        self.penalised_last = penalised_last
        self.repetition = repetition
        self._redraw = redraw
        windows = [rule.window for rule in (repetition, redraw) if rule is not None]
        self.window = max(windows, default=0)
        self.gumbel = GumbelTable()

    def penalised(self, logits: Tensor, times: Tensor, penalty: Tensor) -> Tensor:
        """Logits [n, n_codes] with the repetition penalty: they move away from repetitions.

        Args:
            times: [n, n_codes], how often each code counts; bool for codes that count once.
            penalty: [n] float32.
        """
        factor = penalty.unsqueeze(1).to(logits.dtype)
        if self.repetition is not None and self.repetition.product:
            factor = factor**times
        else:
            factor = torch.where(times > 0, factor, 1.0)
        return torch.where(logits < 0, logits * factor, logits / factor)

    def truncated(self, logits: Tensor, temperature: Tensor, greedy: Tensor) -> Tensor:
        """Logits [n, n_codes] with -inf for what is no candidate, where choose() draws among all.

        temperature: [n], of the draw. greedy: [n] bool, requests whose logits stay.
        """
        n_codes = logits.shape[-1]
        top, ids = logits.float().topk(min(self._top_k or n_codes, n_codes), dim=-1)
        kept = self._kept(top / temperature.unsqueeze(1), None) > -torch.inf
        is_candidate = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, kept)
        return torch.where(is_candidate | greedy.unsqueeze(1), logits, -torch.inf)

    def times(self, history: Tensor, n_codes: int) -> Tensor:
        """[n, n_codes] int64, occurrences in the penalty's window of history [n, >= window]."""
        assert self.repetition is not None and self.repetition.window
        return occurrences(history[:, -self.repetition.window :], n_codes)

    def choose(
        self,
        logits: Tensor,
        temperature: Tensor | float,
        greedy: Tensor | None,
        draw: Tensor | None,
        history: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            logits: [n, n_codes], -inf for what is not allowed.
            temperature: of the draw, a number or [n].
            greedy: [n] bool, requests that take the likeliest code; None: none does.
            draw: [n] of `draws_of`; None: all are greedy.
            history: [n, >= window] int64, the newest codes, the last one behind; NO_CODE before
                the first. Needed with a window.
        Returns:
            [n] int64.
        """
        if draw is None:
            return logits.argmax(dim=-1)
        n_codes = logits.shape[-1]
        n_top = n_codes if self.penalised_last else min(self._top_k or n_codes, n_codes)
        top, ids = logits.float().topk(n_top, dim=-1)
        if isinstance(temperature, Tensor):
            temperature = temperature.unsqueeze(1)
        if isinstance(temperature, Tensor) or temperature != 1:
            top = top / temperature
        if not self.penalised_last:
            top = self._kept(top, logits.float() / temperature if self._of_all else None)
        pick = (top + self.gumbel(draw, ids)).argmax(dim=-1, keepdim=True)
        if greedy is not None:
            pick = pick.masked_fill(greedy.unsqueeze(1), 0)
        code = ids.gather(1, pick).squeeze(1)
        if self._redraw is None:
            return code
        assert history is not None, "a redraw needs a history"
        again = self._drawn_again(logits.float(), code, draw, history)
        return again if greedy is None else torch.where(greedy, code, again)

    def _kept(self, top: Tensor, all_codes: Tensor | None) -> Tensor:
        """Candidates in descending order, with -inf for those outside of top-p and min-p.

        all_codes: [n, n_codes] of whose mass top_p is a share; None: of the candidates'.
        """
        if self._top_p < 1:
            # Keep a code while the mass before it is below top_p.
            mass = top.softmax(dim=-1)
            if all_codes is not None:
                mass = (top - all_codes.logsumexp(dim=-1, keepdim=True)).exp()
            before = mass.cumsum(dim=-1) - mass
            top = top.masked_fill(before >= self._top_p, -torch.inf)
        if self._min_p > 0:
            share = (top - top[:, :1]).exp()
            top = top.masked_fill(share < self._min_p, -torch.inf)
        return top

    def _drawn_again(self, logits: Tensor, code: Tensor, draw: Tensor, history: Tensor) -> Tensor:
        rule = self._redraw
        assert rule is not None
        often = (history[:, -rule.window :] == code.unsqueeze(1)).sum(dim=1) >= rule.least
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
        if rule.excludes:
            logits = logits.scatter(1, code.unsqueeze(1), -torch.inf)
        # Other noise than that which has chosen the code.
        other = (draw + TABLE_SIZE // 2) & (TABLE_SIZE - 1)
        return torch.where(often, (logits + self.gumbel(other, ids)).argmax(dim=-1), code)


def occurrences(history: Tensor, n_codes: int) -> Tensor:
    """[n, n_codes] int64 of history [n, window], in which NO_CODE is none."""
    counts = history.new_zeros(len(history), n_codes + 1)
    at = torch.where(history == NO_CODE, n_codes, history)
    return counts.scatter_add_(1, at, torch.ones_like(at))[:, :n_codes]
