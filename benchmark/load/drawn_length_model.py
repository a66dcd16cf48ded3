"""Models whose responses have the requested lengths.

The random demo model ends its responses at random, and a run lasts as long as its longest user.
With these models the thinker never ends by itself, the talker ends with the text, and users request
a number of tokens. There are a demo model, with one 80 ms frame for each token, and those of
lab/random_model.
"""

from dataclasses import replace
from pathlib import Path

from lab.random_model.folder import Facts, is_random_model

# Logits of an end that is never sampled, and of one that is sampled as soon as it is allowed.
_NEVER, _AT_ONCE = -30.0, 30.0


def has_drawn_lengths(model_path: str) -> bool:
    return model_path == "demo-random" or is_random_model(Path(model_path))


def frames_per_token(model_path: str) -> float:
    """Of a model with drawn lengths."""
    path = Path(model_path)
    return Facts.of(path).frames_per_token if is_random_model(path) else 1.0


def drawn_length_model(*, shallow: bool) -> Path:
    """Directory of the demo model whose responses have the requested length; built if absent.

    shallow: with one layer in each part, for a modelled device: what computes beneath it must take
        less time than the device would.
    """
    from sglang_live.models.demo.build import ensure_built
    from sglang_live.models.demo.location import DemoSize

    size = DemoSize(thinker_end_logit=_NEVER, talker_end_logit=_AT_ONCE)
    if shallow:
        size = replace(size, thinker_layers=1, talker_layers=1, predictor_layers=1)
    return ensure_built(size)
