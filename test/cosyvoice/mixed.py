"""CosyVoice 2 that draws fill tokens, too, as test/cosyvoice/checkpoint.py makes it.

Of its voices one has words for more codes than its recording has, one ends with a whole block.
"""

from functools import partial

from test.cosyvoice import checkpoint
from test.cosyvoice.checkpoint import CODES, N_BOOKS, recordings

__all__ = ["CODES", "N_BOOKS", "recordings"]
VOICE = "dora"
VOICES = {"anna": (20, 40), "carl": (14, 45), VOICE: (9, 22)}
build = partial(checkpoint.build, fill_every=40, voices=VOICES)
Reference = partial(checkpoint.Reference, fill_every=40)
