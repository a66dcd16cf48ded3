"""CosyVoice 3, as test/cosyvoice/checkpoint.py makes CosyVoice 2. No length holds its end back."""

from functools import partial

from test.cosyvoice import checkpoint
from test.cosyvoice.checkpoint import CODES, N_BOOKS, VOICE, recordings

__all__ = ["CODES", "N_BOOKS", "VOICE", "recordings"]
build = partial(checkpoint.build, version=3, end_every=160)
Reference = partial(checkpoint.Reference, version=3, end_every=160)
