"""What a round will take: the prediction that best-effort work is fitted to.

Linear in what a round computes, with coefficients that bridge/round_cost.py measures while the
engine runs. The terms are those of BROS (arXiv 2504.09590): the input, its context and what is
transferred.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """Seconds by what a round computes, and how far predictions were off.

    Attributes:
        decode: of a decode round: fixed, per stream, per KV token of its streams.
        prefill: of a prefill: fixed, per token, per pair of a token and a token of its context,
            per square of a prompt's tokens, per second of audio that is encoded, per token of KV
            that is loaded from the host.
        decode_error, prefill_error: relative error that nine of ten of the latest predictions do
            not exceed; inf: too few rounds were measured.
    """

    decode: tuple[float, float, float] = (0.01, 1e-4, 0.0)
    prefill: tuple[float, float, float, float, float, float] = (0.01, 1e-4, 0.0, 0.0, 0.005, 0.0)
    decode_error: float = math.inf
    prefill_error: float = math.inf

    def decode_s(self, n_streams: Floats | float, context_tokens: Floats | float) -> Floats:
        """Of decode rounds, elementwise."""
        fixed, per_stream, per_token = self.decode
        return np.asarray(fixed + per_stream * n_streams + per_token * context_tokens)

    def prefill_s(
        self, tokens: float, context_tokens: float, audio_s: float = 0.0, loaded: float = 0.0
    ) -> float:
        """Of a prefill of one prompt, of which context_tokens are computed."""
        fixed, per_token, per_pair, per_square, per_audio, per_loaded = self.prefill
        own = fixed + per_audio * audio_s + per_loaded * loaded
        return own + tokens * (per_token + per_pair * context_tokens + per_square * tokens)

    def tokens_within(self, limit_s: float, context_tokens: float, audio_s: float = 0.0) -> float:
        """The most tokens that a prefill of one prompt computes within limit_s; may be inf."""
        _, per_token, per_pair, square, _, _ = self.prefill
        left_s = limit_s - self.prefill_s(0.0, context_tokens, audio_s)
        if left_s <= 0.0:
            return 0.0
        linear = per_token + per_pair * context_tokens
        # The root of square x² + linear x = left_s, in the form that has no difference.
        divisor = linear + math.sqrt(linear * linear + 4.0 * square * left_s)
        return 2.0 * left_s / divisor if divisor > 0.0 else math.inf


# Before the first batch is measured.
UNMEASURED = RoundCost()
