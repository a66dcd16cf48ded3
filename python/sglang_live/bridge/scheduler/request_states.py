"""Request states in SGLang's tokenizer manager: those of a batch are created together or not."""

from collections.abc import Callable
from typing import Any


def all_or_none(make_states: Callable[..., None], manager: Any, obj: Any, *args: Any) -> None:
    """Around TokenizerManager._init_req_state.

    Raises:
        ValueError: an id is in use, or occurs twice in the batch; no state was created.
    """
    names = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    for n, name in enumerate(names):
        if name in manager.rid_to_state or name in names[:n]:
            raise ValueError(f"Duplicate request ID detected: {name}")
    make_states(manager, obj, *args)
