"""What a session said before the load begins: a written message of many words."""

import json
from importlib import resources

import numpy as np

# A stream of random numbers apart from those of users, arrivals and storms.
_HISTORY_STREAM = 2**31 + 2


def history_message(n_words: int, seed: tuple[int, int], user: int) -> str:
    """A conversation.item.create with words drawn for this user."""
    rng = np.random.default_rng([*seed, _HISTORY_STREAM, user])
    corpus = resources.files("sglang_live.models.demo").joinpath("corpus.txt").read_text("utf-8")
    text = " ".join(rng.choice(corpus.split(), n_words))
    content = [{"type": "input_text", "text": text}]
    item = {"type": "message", "role": "user", "content": content}
    return json.dumps({"type": "conversation.item.create", "item": item})
