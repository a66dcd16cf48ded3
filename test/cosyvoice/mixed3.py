"""CosyVoice 3, as test/cosyvoice/mixed.py makes CosyVoice 2."""

from functools import partial

from test.cosyvoice import mixed
from test.cosyvoice.mixed import CODES, N_BOOKS, VOICE, recordings

__all__ = ["CODES", "N_BOOKS", "VOICE", "recordings"]
build = partial(mixed.build, version=3, end_every=160)
Reference = partial(mixed.Reference, version=3, end_every=160)
