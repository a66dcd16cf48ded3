"""Truncation of streaming sessions, and a repair of how upstream rejects a session's requests.

SGLang's streaming sessions only append. Between two requests their length is recorded in two
places: the finished request that the next one extends, and the slot that keeps its KV.
Truncation shortens both.
"""

from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot

from sglang_live.bridge.cache.session_cache import SessionCache
from sglang_live.bridge.session.compact import outputs_of
from sglang_live.bridge.session.kv_record import LiveKvInfo, n_on_device
from sglang_live.bridge.session.media import media_before, media_spans


class NoSessions:
    """In the place of a StreamingSession, if SGLang's cache supports no sessions."""

    def __init__(self) -> None:
        self.slots: dict[str, SessionSlot] = {}


_NO_SESSIONS = NoSessions()


def truncate_session(scheduler: Any, session_id: str, position: int) -> int:
    """Truncate a session between two requests, its first tokens' KV kept.

    Args:
        position: tokens to keep, counting those that compaction has dropped.
    Returns:
        position, or -1 if the session cannot be truncated there and is unchanged.
    """
    session = scheduler.session_controller.get(session_id)
    streaming = streaming_sessions(scheduler.tree_cache)
    slot = streaming.slots.get(session_id)
    if session is None or slot is None:
        return -1
    if session._inflight or not session.req_nodes:
        return -1
    [node] = session.req_nodes.values()
    req = node.req
    n_tokens = _index_of(slot.kv, position)
    if n_tokens is None or not slot.kv.cache_protected_len <= n_tokens <= _length(req):
        return -1
    if n_tokens < len(req.origin_input_ids) and not _drop_input(session, req, n_tokens):
        return -1
    kept = max(0, n_tokens - len(req.origin_input_ids))
    req.output_ids = outputs_of(req)[:kept]
    if isinstance(streaming, SessionCache):
        streaming.before_truncation(session_id, n_tokens)
    if slot.kv.kv_allocated_len > n_tokens:
        streaming._free_tail(slot.kv, n_tokens)
        if isinstance(streaming, SessionCache):
            streaming.resized(session_id)
    return position


def streaming_sessions(tree_cache: Any) -> Any:
    """SGLang's StreamingSession, with its slots; or NoSessions."""
    return getattr(tree_cache, "session", _NO_SESSIONS)


def n_computed(streaming: Any, session_id: str) -> int:
    """Tokens of a session that its next request need not compute."""
    if isinstance(streaming, SessionCache):
        return streaming.n_computed(session_id)
    return n_on_device(streaming.slots, session_id)


def n_kept(streaming: Any, session_id: str) -> int:
    """Tokens of a session whose device memory its next request has for certain."""
    if isinstance(streaming, SessionCache):
        return streaming.n_kept(session_id)
    return n_on_device(streaming.slots, session_id)


def _index_of(kv: Any, position: int) -> int | None:
    """Returns None if compaction dropped the position."""
    return kv.index_of(position) if isinstance(kv, LiveKvInfo) else position


def _length(req: Req) -> int:
    return len(req.origin_input_ids) + len(outputs_of(req))


def _drop_input(session: Session, req: Req, n_tokens: int) -> bool:
    """Drop input tokens from n_tokens on. Returns False inside a span of audio or an image."""
    media = req.multimodal_inputs
    if any(first < n_tokens < behind for first, behind in media_spans(media)):
        return False
    if media is not None:
        req.multimodal_inputs = media_before(media, n_tokens)
    n_dropped = len(req.origin_input_ids) - n_tokens
    unpadded = req.origin_input_ids_unpadded
    if unpadded is not req.origin_input_ids:
        del unpadded[len(unpadded) - n_dropped :]
    del req.origin_input_ids[n_tokens:]
    session.committed_origin_len = n_tokens
    session.committed_unpadded_len = len(req.origin_input_ids_unpadded)
    # The next request rebuilds it; its present content includes the dropped tokens.
    req.full_untruncated_fill_ids = []
    return True


def detach_rejected(request: Req, session: Session, *args: Any, **kwargs: Any) -> Req:
    """After Session.create_req: detach a rejected request from its session.

    Upstream leaves it attached; when it is discarded, it clears the flag that the running request
    set, and a third request is admitted beside the first, into the same token arrays.
    """
    if session.streaming and request.to_finish is not None:
        request.session = None
    return request
