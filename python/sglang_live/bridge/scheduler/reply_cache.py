"""Frames of a reply stay out of the radix tree while it is being spoken.

A reply that was retracted is prefilled with the frames it has. SGLang would hand them to the tree
as if they were a prompt. Nobody else will ever say the same, and what the tree owns a long reply
cannot drop (bridge/scheduler/talker_window.py).
"""

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.streaming_session import StreamingSession

from sglang_live.engine_channel.messages import SPEAK_PREFIX


class ReplyCache(StreamingSession):
    """Installed as `session` of the talker's tree cache, which asks it first."""

    def try_cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs) -> bool:
        if not (req.retracted_stain and req.rid.startswith(SPEAK_PREFIX)):
            return super().try_cache_unfinished_req(req, chunked=chunked, **kwargs)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(req.get_fill_ids())]
        req.prefix_indices = row.to(dtype=torch.int64, copy=True)
        return True
