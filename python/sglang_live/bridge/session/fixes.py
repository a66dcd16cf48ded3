"""Upstream faults of streaming sessions that callers meet daily: they hang up and call again.

Both concern `Session._inflight`, which says that a request of the session is under way.
"""

from sglang_live.bridge.session.cache import SessionCache


def detach_rejected(request, session, *args, **kwargs):
    """After Session.create_req: a request that was refused has no business in the session.

    Upstream leaves it attached; when it is discarded, it clears the flag that the running request
    owns, and a third request is admitted beside the first, into the same token arrays.
    """
    if session.streaming and request.to_finish is not None:
        request.session = None
    return request


def release_waiting(result, scheduler, req):
    """After Scheduler._release_aborted_request: the session of a request aborted while it waited.

    Upstream forgets it: the session then refuses every later turn, and never closes.
    """
    session = req.session
    if session is not None and session.streaming and not req.finished():
        session.abort_req()
        if req.retracted_stain:
            # Its KV is the session's, but its tokens will not be.
            sessions = getattr(scheduler.tree_cache, "session", None)
            if isinstance(sessions, SessionCache):
                sessions.forget_if_compacted(session)
            scheduler.tree_cache.release_session(session.session_id)
    return result
