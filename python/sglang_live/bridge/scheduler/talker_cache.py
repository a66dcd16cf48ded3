"""Keeps the frames of running talker requests out of the radix tree.

A retracted request is prefilled with the frames it has produced. SGLang would insert them into
the tree as part of the prompt. No other request has the same frames, and a long request cannot
drop KV that the tree owns (bridge/scheduler/talker_window.py).
"""

from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.streaming_session import StreamingSession

from sglang_live.ids import SPEECH_PREFIXES


class TalkerCache(StreamingSession):
    """Installed as `session` of the talker's tree cache, which calls it first."""

    def try_checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> bool:
        if req.retracted_stain and req.rid.startswith(SPEECH_PREFIXES):
            return True
        handled: bool = super().try_checkpoint(req, up_to=up_to, **kwargs)
        return handled
