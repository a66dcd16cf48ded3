"""Errors that several stages raise."""

from sglang_live.errors import BadInputError


class ItemsMissingError(BadInputError):
    """The stage lacks items of the history, because it was restarted: send all of them again."""

    code = "items_missing"
