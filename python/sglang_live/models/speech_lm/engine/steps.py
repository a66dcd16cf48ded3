"""What the steps of every talker's model have in common."""

from collections.abc import Iterator, Mapping

from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from torch import Tensor

from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.talker_state import TalkerStream


def chunks(forward_batch) -> Iterator[tuple[str, int, int]]:
    """(rid, prefix_len, extend_len) of every request of a prefill batch."""
    return zip(
        forward_batch.rids,
        forward_batch.extend_prefix_lens_cpu,
        forward_batch.extend_seq_lens_cpu,
        strict=True,
    )


def logical_positions(
    positions: Tensor, forward_batch, streams: Mapping[str, TalkerStream]
) -> Tensor:
    """Positions of a prefill, with the offset of frames that a retracted request dropped.

    They are changed in place, because a prefill graph reads them there.
    """
    if not forward_batch.forward_mode.is_extend():
        return positions
    at = 0
    for rid, prefix, n in chunks(forward_batch):
        stream = streams.get(rid)
        if stream is not None and stream.dropped_before(prefix + n - 1):
            first = max(stream.sink - prefix, 0)
            positions[at + first : at + n] += stream.n_dropped
        at += n
    return positions


def three_axes(positions: Tensor, forward_batch, streams: Mapping[str, TalkerStream]) -> Tensor:
    """[3, n]: time, height and width; [n] as they are, if no prompt of the prefill has pictures."""
    if not has_pictures(forward_batch, streams):
        return positions
    positions = positions.expand(3, -1).clone()
    at = 0
    for rid, prefix, n in chunks(forward_batch):
        stream = streams.get(rid)
        if stream is not None and stream.pictures:
            shifts = stream.shifts(prefix, prefix + n)
            positions[:, at : at + n] += copy_to(shifts, positions.device, positions.dtype)
        at += n
    return positions


def has_pictures(forward_batch, streams: Mapping[str, TalkerStream]) -> bool:
    """Of a prefill."""
    found = map(streams.get, forward_batch.rids or ())
    return any(stream is not None and stream.pictures for stream in found)


def all_greedy(greedy: Tensor) -> bool:
    """Whether no request of the batch samples; False where it is not known without a wait."""
    # A branch on device data would sync, and a captured graph must not branch at all.
    if greedy.device.type != "cpu" or get_is_capture_mode():
        return False
    return bool(greedy.all())
