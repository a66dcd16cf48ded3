"""The KV record of one session: SGLang's fields, and those of compaction and eviction."""

from collections.abc import Mapping
from dataclasses import fields

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.session.streaming_session import SessionSlot, _VirtualNode


class LiveKvInfo(ReqKvInfo):
    """A session's KV record.

    A token at index i >= sink_tokens has position i + n_dropped.

    Attributes:
        parked: device slots of the session's prefix in the radix tree; None while it has a row.
        sink_tokens: tokens before the compacted span.
        n_dropped: tokens that compaction has dropped behind the sink.
    """

    parked: torch.Tensor | None = None
    sink_tokens: int = 0
    n_dropped: int = 0

    @staticmethod
    def of(kv: ReqKvInfo) -> "LiveKvInfo":
        # Upstream's record has __slots__, so it takes no further attributes; a subclass does.
        if isinstance(kv, LiveKvInfo):
            return kv
        live = LiveKvInfo()
        for field in fields(ReqKvInfo):
            setattr(live, field.name, getattr(kv, field.name))
        return live

    def index_of(self, position: int) -> int | None:
        """The token index at a position.

        Returns None if compaction dropped the position, or if it lies in the sink of a compacted
        session: a session that ends there would lose the record of what it dropped.
        """
        if not self.n_dropped:
            return position
        return position - self.n_dropped if position >= self.sink_tokens + self.n_dropped else None


def n_on_device(slots: Mapping[str, SessionSlot], session_id: str) -> int:
    """Tokens of a session on the device."""
    slot = slots.get(session_id)
    return 0 if slot is None else int(slot.kv.kv_committed_len)


class SessionNode(_VirtualNode):
    """A session's KV, in the role of a radix tree node that SGLang locks.

    Attributes:
        n_pins: locks by requests that run or are considered for admission.
        own_from: token index at which the session's own KV begins, behind its prefix in the tree,
            while SGLang's cache_protected_len is wrong: SGLang counts what was loaded from the
            host as part of the tree. None: SGLang's value is right.
    """

    def __init__(self, session_id: str):
        self.session_id = session_id
        self.n_pins = 0
        self.own_from: int | None = None
