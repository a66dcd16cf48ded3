"""Measured rates of an engine: each batch is timed when its result arrives.

With overlap the scheduler launches a batch before the result of the one before it has arrived, and
a device computes them one after the other. So a batch takes the time from the end of the batch
before it, or from its own launch if the device was idle, to its own end.
In: launches and arrivals on rank 0. Out: the StageRates of a RoundStamp, which all ranks use.
Owner: one RateMeter per engine, on rank 0. Reads no clock.
"""

from collections import deque
from dataclasses import replace

import numpy as np

from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.least_squares import non_negative
from sglang_live.bridge.round_cost import NoRoundCost, RoundCostMeter
from sglang_live.policy.round_cost import RoundCost
from sglang_live.policy.view import StageRates

# Weight of the newest round in the mean duration of a round: an average over about ten rounds.
_EMA = 0.1
# Time constant of the measured share of time in which the engine computes.
_BUSY_WINDOW_S = 2.0
# A longer decode round is a fault of the machine, not a rate.
_LONGEST_ROUND_S = 2.0


class _Slope:
    """Seconds by which one more request lengthens a decode round.

    Exponentially weighted least squares over the latest rounds; nan until batch sizes differ.
    """

    _WEIGHT = 0.02
    _MIN_VARIANCE = 0.2  # requests squared

    def __init__(self) -> None:
        self._mean_n = self._mean_s = self._var = self._cov = 0.0
        self._seen = False

    def take(self, n_streams: int, round_s: float) -> None:
        if not self._seen:
            self._mean_n = float(n_streams)
            self._mean_s = round_s
            self._seen = True
        dn, ds, w = n_streams - self._mean_n, round_s - self._mean_s, self._WEIGHT
        self._mean_n += w * dn
        self._mean_s += w * ds
        self._var = (1 - w) * (self._var + w * dn * dn)
        self._cov = (1 - w) * (self._cov + w * dn * ds)

    @property
    def value(self) -> float:
        if self._var < self._MIN_VARIANCE:
            return float("nan")
        return max(0.0, self._cov / self._var)


class PrefillFit:
    """Duration of a prefill: fixed + per token + per second of audio + per attended pair.

    Least squares of the relative errors of the latest prefills, twice: the second time without
    those that the first explains worst, such as a prefill that compiled a kernel. Where the
    prefills do not determine a cost, because all have the same size, it stays near its last value.
    A token's cost grows with its context; the rate is the cost at the contexts of the latest
    prefills, so that the slices of a long prompt do not become longer one by one.
    No cost is negative. Few short prefills may show no cost of a token, and a long one would then
    seem free: a token costs at least a tenth of what it did in the quickest of them.
    """

    _KEPT = 64
    # Weight of the last values beside one prefill.
    _INERTIA = 0.05
    # A prefill whose error is this many times the median is left out, from an error of a tenth on.
    _OUTLIER, _TOLERANCE = 3.0, 0.1
    _LEAST = 0.1
    # Weight of a prefill's context beside that of the next one.
    _RECENT = 0.7
    # Smallest scale of each cost: one that was zero can be found again.
    _SCALE = np.array([1e-3, 1e-5, 1e-3, 1e-9])

    def __init__(self, rates: StageRates):
        self._costs = np.array(
            [rates.prefill_s_fixed, rates.prefill_s_per_token, rates.encoder_s_per_audio_s, 0.0]
        )
        self._recent_tokens = self._recent_pairs = 0.0
        self._seen: deque[tuple[float, ...]] = deque(maxlen=self._KEPT)

    def take(self, work: BatchWork, spent_s: float) -> None:
        n_tokens, n_pairs = float(work.n_tokens), float(work.n_pairs)
        # Long prefills count more: a prompt between two slices of another does not hide it.
        self._recent_tokens = self._RECENT * self._recent_tokens + n_tokens
        self._recent_pairs = self._RECENT * self._recent_pairs + n_pairs
        self._seen.append((1.0, n_tokens, work.audio_s, n_pairs, spent_s))
        found = np.array(self._seen)
        sizes, spent = found[:, :4], found[:, 4]
        costs = self._fit(sizes, spent)
        error = np.abs(spent - sizes @ costs) / np.maximum(spent, sizes @ costs)
        is_usual = error <= max(self._OUTLIER * float(np.median(error)), self._TOLERANCE)
        self._costs = costs if is_usual.all() else self._fit(sizes[is_usual], spent[is_usual])
        quickest = float((spent / np.maximum(sizes[:, 1], 1.0)).min())
        self._costs[1] = max(self._costs[1], self._LEAST * quickest)

    def into(self, rates: StageRates) -> StageRates:
        fixed_s, per_token_s, per_audio_s, per_pair_s = self._costs.tolist()
        context_tokens = self._recent_pairs / max(self._recent_tokens, 1.0)
        return replace(
            rates,
            prefill_s_fixed=fixed_s,
            prefill_s_per_token=per_token_s + context_tokens * per_pair_s,
            encoder_s_per_audio_s=per_audio_s,
        )

    def _fit(self, sizes: np.ndarray, spent: np.ndarray) -> np.ndarray:
        """
        Args:
            sizes: [n, 4] float64: 1, tokens, seconds of audio, attended pairs.
            spent: [n] float64, seconds.
        Returns:
            [4] float64, costs of at least 0.
        """
        # A result that was noticed late makes the batch after it seem short: its error counts
        # relative to what it should have taken.
        scale = np.maximum(spent, sizes @ self._costs)
        rows = sizes / scale[:, None]
        inertia = self._INERTIA / np.maximum(self._costs, self._SCALE)
        square = rows.T @ rows + np.diag(inertia**2)
        right = rows.T @ (spent / scale) + inertia**2 * self._costs
        return non_negative(square, right)


def expected_s(work: BatchWork, rates: StageRates) -> float:
    """Time that a batch will take."""
    if work.n_streams:
        return rates.round_s
    variable_s = work.n_tokens * rates.prefill_s_per_token
    return rates.prefill_s_fixed + variable_s + work.audio_s * rates.encoder_s_per_audio_s


class RateMeter:
    """
    Attributes:
        n_done: number of the latest batch whose result has arrived; 0: none has.
        prefill_done_s: arrival of the latest prefill's result.

    Args:
        predicts: whether the cost of whole rounds is measured, for best effort.
    """

    def __init__(self, *, predicts: bool = False):
        self.n_done = 0
        self._round_cost = RoundCostMeter() if predicts else NoRoundCost()
        self.prefill_done_s = 0.0
        self._rates = StageRates()
        self._slope = _Slope()
        self._prefill = PrefillFit(self._rates)
        self._done_s = self._spent_s = self._looked_s = 0.0

    def arrived(self, launch: Launch, now_s: float) -> None:
        """Book a batch whose result has just arrived. Results arrive in the order of launches."""
        spent_s = now_s - max(self._done_s, launch.at_s)
        work, self._done_s = launch.work, now_s
        self._spent_s += spent_s
        self.n_done = work.number
        if not work.n_streams:
            self.prefill_done_s = now_s
        if spent_s <= 0.0:
            return
        self._round_cost.take(work, spent_s)
        if not work.n_streams:
            self._prefill.take(work, spent_s)
            self._rates = self._prefill.into(self._rates)
        elif spent_s < _LONGEST_ROUND_S:
            self._slope.take(work.n_streams, spent_s)
            round_s = self._rates.round_s
            self._rates = replace(
                self._rates,
                round_s=round_s + _EMA * (spent_s - round_s),
                round_s_per_stream=self._slope.value,
            )

    def rates(self, now_s: float) -> StageRates:
        """The rates so far. To be called once a round: `busy` is measured between the calls."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        spent_s, self._spent_s = self._spent_s, 0.0
        window_s = max(_BUSY_WINDOW_S, passed_s)
        busy = self._rates.busy + (spent_s - passed_s * self._rates.busy) / window_s
        self._rates = replace(self._rates, busy=min(max(busy, 0.0), 1.0))
        return self._rates

    @property
    def cost(self) -> RoundCost:
        """What whole rounds take; initial values where that is not measured."""
        return self._round_cost.cost
