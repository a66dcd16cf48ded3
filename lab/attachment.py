"""How code of the laboratory gets into the processes of a server, and replaces what is there.

Each module that can be attached has a function that returns the environment of the stages in which
it is: the product then calls its `attach` (python/sglang_live/attachment.py), or makes it a part of
schedulers (python/sglang_live/bridge/scheduler/composition.py).
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from sglang_live.attachment import ATTACH_ENV
from sglang_live.engine_channel.inbox import PARTS_ENV

ROOT = Path(__file__).parents[1]


def joined(*environments: Mapping[str, str]) -> dict[str, str]:
    """One environment with the attachments, and the parts of schedulers, of all of these."""
    everything = {name: value for one in environments for name, value in one.items()}
    for variable in (ATTACH_ENV, PARTS_ENV):
        if found := [one[variable] for one in environments if one.get(variable)]:
            everything[variable] = ",".join(found)
    return everything


def importable() -> dict[str, str]:
    """For a server that runs in another folder than the checkout's root."""
    paths = str(ROOT), os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def attach_to_own_server(environment: Mapping[str, str]) -> None:
    """The stages of servers that this process starts have this environment."""
    os.environ.update(joined(os.environ, environment, importable()))


def around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Have calls of `owner.name` go to `function`, whose first argument is what was there.

    Modules of the product that have imported it from its own module call the function, too.

    Raises:
        AttributeError: the owner defines no such name (any more).
    """
    if name not in vars(owner):
        raise AttributeError(f"{owner.__name__} defines no {name}: the laboratory is out of date")
    plain = vars(owner)[name]

    @wraps(plain)
    def attached(*args: Any, **kwargs: Any) -> Any:
        return function(plain, *args, **kwargs)

    setattr(owner, name, attached)
    if plain.__module__ == owner.__name__:
        for module in [m for n, m in sys.modules.items() if n.startswith("sglang_live.")]:
            if vars(module).get(name) is plain:
                setattr(module, name, attached)


def sglangs_scheduler() -> type:
    """SGLang's own class, also where a seam has put one of the product in its place."""
    from sglang.srt.managers import scheduler

    classes: tuple[type, ...] = scheduler.Scheduler.__mro__
    return next(found for found in classes if found.__module__ == scheduler.__name__)
