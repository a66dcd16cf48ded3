"""A scheduler's facts and folds, without SGLang's loop, memory and sockets."""

from types import SimpleNamespace
from typing import Any

from sglang_live.bridge.cache.truncate import NoSessions
from sglang_live.bridge.scheduler.live import LiveScheduler
from sglang_live.bridge.scheduler.memory import Memory
from sglang_live.bridge.scheduler.part import Part
from sglang_live.bridge.scheduler.pausing import Pausing


class FakeScheduler(LiveScheduler):
    """
    Args:
        facts: attributes of SGLang's scheduler.
    """

    def __init__(self, **facts: Any):
        self.chunked_req = None
        self.waiting_queue: list = []
        self.page_size = 1
        self.is_first_rank = True
        self.sent: list = []
        self.channel = SimpleNamespace(send=self.sent.append, wake_on=lambda source: None)
        self.tree_cache = SimpleNamespace(session=NoSessions(), evictable_size=lambda: 0)
        vars(self).update(facts)
        self.memory, self.pausing = Memory(self), Pausing(self)
        self.parts: tuple[Part, ...] = (self.memory, self.pausing)

    def compose(self, *parts: Part) -> None:
        """Add parts, and start all."""
        self.parts = (self.memory, self.pausing, *parts)
        for part in self.parts:
            part.start()
