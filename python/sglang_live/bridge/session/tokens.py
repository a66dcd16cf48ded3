"""The token arrays of a streaming session, which its last finished request keeps for the next."""

from array import array

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.session.session_controller import Session

from sglang_live.kv.retention import Compaction


def outputs_of(req: Req) -> array:
    return req.output_ids[: req.sampling_params.max_new_tokens]


def length_of(session: Session, req: Req) -> int:
    """Tokens of a session whose last finished request is `req`."""
    # An aborted turn may have left its tokens in the same array.
    return session.committed_origin_len + len(outputs_of(req))


def fold_outputs(session: Session, req: Req) -> None:
    """Make the finished request's reply part of its input, as its successor would.

    All of it has been sent: a finished request is not looked at again.
    """
    outputs = outputs_of(req)
    ids, unpadded = req.origin_input_ids, req.origin_input_ids_unpadded
    # An aborted turn may have left its tokens here.
    del ids[session.committed_origin_len :]
    ids.extend(outputs)
    if unpadded is not ids:
        del unpadded[session.committed_unpadded_len :]
        unpadded.extend(outputs)
    req.output_ids = req.output_ids[:0]


def cut_tokens(req: Req, cut: Compaction) -> None:
    ids, unpadded = req.origin_input_ids, req.origin_input_ids_unpadded
    if unpadded is not ids:
        # Some models have one placeholder here for all tokens of an item.
        if len(unpadded) == len(ids):
            del unpadded[cut.begin : cut.end]
        else:
            req.origin_input_ids_unpadded = ids
    del ids[cut.begin : cut.end]
    # Rebuilt when it is needed.
    req.full_untruncated_fill_ids = array("q")


def confirm_lengths(session: Session, req: Req) -> None:
    """What a later request that is aborted falls back to."""
    session.committed_origin_len = len(req.origin_input_ids)
    session.committed_unpadded_len = len(req.origin_input_ids_unpadded)
    session.committed_fill_len = 0
