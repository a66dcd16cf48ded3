"""A response that is one of several options: the probability of each.

In: texts, the engine's log probabilities of their first tokens. Out: probabilities that sum to 1.
The options begin with different tokens, so that under the constraint the first token decides: an
option's probability is that of its first token among theirs, as decoding draws it at temperature 1.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sglang_live.errors import OptionsAlikeError
from sglang_live.models.prompt import PiecewisePrompt


def tokens_of(options: Sequence[str], prompt: PiecewisePrompt) -> list[int]:
    """The first token of each. Raises OptionsAlikeError unless they differ."""
    tokens = [token for option in options for token in prompt.words(option)[:1]]
    if len(set(tokens)) != len(options):
        raise OptionsAlikeError("For this model two options begin alike.")
    return tokens


def shares_of(tokens: Sequence[int], logprobs: Mapping[int, float]) -> list[float]:
    """
    Args:
        logprobs: of all of the tokens, among all tokens of the model.
    """
    likely = np.array([logprobs[token] for token in tokens], np.float64)
    shares = np.exp(likely - likely.max())
    return [float(share) for share in shares / shares.sum()]
