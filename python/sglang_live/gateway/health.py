"""Whether the stages behind the gateway serve, as the launcher reports it."""

from collections.abc import Mapping
from dataclasses import dataclass

SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Health:
    """stages: state by stage name; every state but SERVING keeps the server from being healthy."""

    stages: Mapping[str, str]

    @property
    def serving(self) -> bool:
        return bool(self.stages) and all(state == SERVING for state in self.stages.values())
