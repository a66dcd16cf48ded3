"""Roll a streaming session back to its first tokens, with their KV kept.

SGLang's streaming sessions only append. Between two requests, though, everything that says how
long a session is lies in two places: the finished request that the next one will extend, and the
slot that keeps its KV. Both are cut here.
"""

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.session_controller import Session

from sglang_live.bridge.kv_record import LiveKvInfo
from sglang_live.bridge.session.cache import SessionCache
from sglang_live.bridge.session.media import media_before, media_spans


def truncate_session(scheduler, session_id: str, position: int) -> int:
    """Returns where the session ends now, or -1: it cannot be cut there, and is unchanged.

    Args:
        position: tokens to keep, counting those that retention has dropped.
    """
    session = scheduler.session_controller.get(session_id)
    streaming = streaming_sessions(scheduler.tree_cache)
    slot = streaming.slots.get(session_id) if streaming is not None else None
    if session is None or slot is None or session._inflight or not session.req_nodes:
        return -1
    [node] = session.req_nodes.values()
    req = node.req
    n_tokens = _place_of(slot.kv, position)
    if n_tokens is None or not slot.kv.cache_protected_len <= n_tokens <= _length(req):
        return -1
    if n_tokens < len(req.origin_input_ids) and not _drop_input(session, req, n_tokens):
        return -1
    kept = max(0, n_tokens - len(req.origin_input_ids))
    req.output_ids = _outputs(req)[:kept]
    if isinstance(streaming, SessionCache):
        streaming.is_truncated(session_id, n_tokens)
    if slot.kv.kv_allocated_len > n_tokens:
        streaming._free_tail(slot.kv, n_tokens)
        if isinstance(streaming, SessionCache):
            streaming.resized(session_id)
    return position


def streaming_sessions(tree_cache):
    """SGLang's keeper of session slots, stand-alone or embedded in the unified cache."""
    if hasattr(tree_cache, "slots"):
        return tree_cache
    return getattr(tree_cache, "session", None)


def n_computed(streaming, session_id: str) -> int:
    """Tokens of a session that its next request need not compute."""
    if isinstance(streaming, SessionCache):
        return streaming.n_computed(session_id)
    slot = streaming.slots.get(session_id)
    return 0 if slot is None else slot.kv.kv_committed_len


def _place_of(kv, position: int) -> int | None:
    """None: what was there has been dropped."""
    return kv.place_of(position) if isinstance(kv, LiveKvInfo) else position


def _outputs(req: Req):
    return req.output_ids[: req.sampling_params.max_new_tokens]


def _length(req: Req) -> int:
    return len(req.origin_input_ids) + len(_outputs(req))


def _drop_input(session: Session, req: Req, n_tokens: int) -> bool:
    """Forget input tokens from n_tokens on; refused in the midst of audio or an image."""
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
    # Rebuilt by the next request; what is there still has the dropped tokens.
    req.full_untruncated_fill_ids = []
    return True
