"""Keeps the frames of running talker requests out of the radix tree.

A retracted request is prefilled with the frames it has produced. SGLang would insert them into
the tree as part of the prompt. No other request has the same frames, and a long request cannot
drop KV that the tree owns (bridge/scheduler/talker_window.py).
"""

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.streaming_session import StreamingSession

from sglang_live.engine_channel.messages import SPEAK_PREFIX


class TalkerCache(StreamingSession):
    """Installed as `session` of the talker's tree cache, which calls it first."""

    def try_cache_unfinished_req(self, req: Req, chunked: bool = False, **kwargs) -> bool:
        if not (req.retracted_stain and req.rid.startswith(SPEAK_PREFIX)):
            return super().try_cache_unfinished_req(req, chunked=chunked, **kwargs)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(req.get_fill_ids())]
        req.prefix_indices = row.to(dtype=torch.int64, copy=True)
        return True
