"""A response that is one of several options: the probability of each.

In: texts, the engine's log probabilities of their tokens. Out: probabilities that sum to 1.
Each option is one token, and they differ, so that its probability under the constraint is that of
its token among theirs: what decoding with a grammar of the options draws from, at temperature 1.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.models.prompt import PiecewisePrompt


def tokens_of(options: Sequence[str], prompt: PiecewisePrompt) -> list[int]:
    """Raises BadInputError unless the options are different tokens of the model."""
    ids = [prompt.words(option) for option in options]
    tokens = [one[0] for one in ids if len(one) == 1]
    if len(set(tokens)) != len(options):
        raise BadInputError("For this model the options are not different tokens.")
    return tokens


def shares_of(tokens: Sequence[int], logprobs: Mapping[int, float]) -> list[float]:
    """
    Args:
        logprobs: of all of the tokens, among all tokens of the model.
    """
    likely = np.array([logprobs[token] for token in tokens], np.float64)
    shares = np.exp(likely - likely.max())
    return [float(share) for share in shares / shares.sum()]
