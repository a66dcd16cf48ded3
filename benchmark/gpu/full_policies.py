"""full_load with all policies, and with more users until its time is over."""

from dataclasses import asdict, dataclass

from benchmark.gpu import full_load
from benchmark.gpu.full_load import run as run


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(full_load.Options):
    """As those of full_load."""

    policies: str = "all"
    sessions: tuple[int, ...] = (32, 48, 64)


TINY = Options(**(asdict(full_load.TINY) | {"policies": Options().policies}))
