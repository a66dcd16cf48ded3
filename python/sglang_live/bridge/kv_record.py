"""What is known of the KV of one session, beyond what SGLang knows."""

from dataclasses import fields

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.session.streaming_session import _VirtualNode


class LiveKvInfo(ReqKvInfo):
    """A session's KV record.

    parked: device slots of what the tree holds for the session, while it has no row.
    sink_tokens, n_dropped: the session has dropped n_dropped tokens behind its first sink_tokens,
        so its token at place p >= sink_tokens has position p + n_dropped.
    """

    parked: torch.Tensor | None = None
    sink_tokens: int = 0
    n_dropped: int = 0

    @staticmethod
    def of(kv: ReqKvInfo) -> "LiveKvInfo":
        # Upstream's record has slots and no room for more; a subclass's instances have.
        if isinstance(kv, LiveKvInfo):
            return kv
        live = LiveKvInfo()
        for field in fields(ReqKvInfo):
            setattr(live, field.name, getattr(kv, field.name))
        return live

    def place_of(self, position: int) -> int | None:
        """Where the session ends that is to end there; None: what was there was dropped.

        Within the sink neither: nothing would be left to say that tokens are missing behind it.
        """
        if not self.n_dropped:
            return position
        return position - self.n_dropped if position >= self.sink_tokens + self.n_dropped else None


class Place(_VirtualNode):
    """Stands for a session's KV where SGLang locks nodes of the tree.

    n_pins: locks by requests that run, or are just being considered.
    own_from: where the session's own KV begins, behind what the tree holds for it, while SGLang
        has it wrong: it takes what was loaded from the host for the tree's. None: it has it right.
    """

    def __init__(self, session_id: str):
        self.session_id, self.n_pins = session_id, 0
        self.own_from: int | None = None
