"""Audio, images and positions of a session whose tokens are compacted or truncated.

A request carries MultimodalInputs of its whole session: items with the indices of their tokens,
and for models with M-RoPE a table of positions. Both are indexed by the tokens that remain, while
the positions in the table are absolute: the KV was computed with them.

Of the other fields, padded_input_ids is read only when its own request is admitted, and the token
ids do not depend on indices.
"""

from dataclasses import replace

import torch
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
from torch import Tensor

from sglang_live.kv.retention import Compaction

# Fields of other models that are indexed by tokens as well; Qwen3-Omni has none of them.
_NOT_COMPACTED = (
    "image_pad_len",
    "num_image_tokens",
    "token_modalities",
    "vision_position_ids",
    "visible_frame_counts",
)


def media_spans(mm_inputs: MultimodalInputs | None) -> list[tuple[int, int]]:
    """Half-open spans of tokens that must be dropped together: ascending, without overlap."""
    spans: list[tuple[int, int]] = []
    items = mm_inputs.mm_items if mm_inputs is not None else []
    for first, behind in sorted(_span(item) for item in items if item.offsets):
        if spans and first < spans[-1][1]:
            # Items may have several runs of tokens each, which interleave.
            spans[-1] = spans[-1][0], max(behind, spans[-1][1])
        else:
            spans.append((first, behind))
    return spans


def compact_media(
    mm_inputs: MultimodalInputs | None, compaction: Compaction, n_tokens: int
) -> MultimodalInputs:
    """The replacement of mm_inputs after a compaction.

    Items inside the compacted span lose their features; the offsets of the others are moved in
    place. Remaining tokens keep their positions, and later tokens get the positions that they
    would have had without compaction.

    Args:
        mm_inputs: of the session's last request, which has finished. None: the session had text
            only, and the model has M-RoPE; from now on its positions need a table as well.
        compaction: splits none of media_spans(), and does not reach the end of the session.
        n_tokens: tokens of the session before the compaction, outputs included.
    """
    assert 0 <= compaction.begin < compaction.end < n_tokens, (compaction, n_tokens)
    if mm_inputs is None:
        mm_inputs = _text(n_tokens)
    other = [name for name in _NOT_COMPACTED if getattr(mm_inputs, name) is not None]
    assert not other, f"sessions of a model that needs {other} cannot be compacted"
    after = replace(mm_inputs, mm_items=_compact_items(mm_inputs.mm_items, compaction))
    if mm_inputs.mrope_positions is not None:
        table = _whole_table(mm_inputs, n_tokens)
        kept = [table[:, : compaction.begin], table[:, compaction.end :]]
        after.mrope_positions = torch.cat(kept, dim=1)
        after.mrope_position_delta = mm_inputs.mrope_position_delta + compaction.n_tokens
        after.mrope_position_delta_repeated_cache = None
    return after


def media_before(mm_inputs: MultimodalInputs, n_tokens: int) -> MultimodalInputs:
    """The replacement of mm_inputs after truncation to the first n_tokens.

    Args:
        n_tokens: splits none of media_spans().
    """
    kept: list[MultimodalDataItem] = []
    dropped: list[MultimodalDataItem] = []
    for item in mm_inputs.mm_items:
        is_before = not item.offsets or _span(item)[1] <= n_tokens
        (kept if is_before else dropped).append(item)
    if not dropped:
        return mm_inputs
    MultimodalInputs(mm_items=dropped).release_features()
    after = replace(mm_inputs, mm_items=kept)
    table = mm_inputs.mrope_positions
    if table is not None and n_tokens < table.shape[1]:
        after.mrope_positions = table[:, :n_tokens]
        # The positions of text continue from the last remaining one.
        delta = int(table[:, n_tokens - 1].max()) + 1 - n_tokens
        after.mrope_position_delta = torch.full_like(mm_inputs.mrope_position_delta, delta)
        after.mrope_position_delta_repeated_cache = None
    return after


def position_gap(mm_inputs: MultimodalInputs, sink_tokens: int) -> int:
    """Unused positions between a session's sink and the tokens behind it.

    Fewer than the dropped tokens if these included images: all tokens of an image share a few
    positions.
    """
    table = mm_inputs.mrope_positions
    assert 0 <= sink_tokens < table.shape[1], (sink_tokens, table.shape)
    if sink_tokens == 0:
        return int(table.min())
    return int(table[:, sink_tokens:].min() - table[:, :sink_tokens].max()) - 1


def shift_positions(
    mm_inputs: MultimodalInputs, delta: int, *, sink_tokens: int
) -> MultimodalInputs:
    """The replacement of mm_inputs after keys behind the sink are rebased by `delta`.

    Args:
        mm_inputs: of a session that has been compacted behind its first sink_tokens.
        delta: at most position_gap().
    """
    assert 0 <= delta <= position_gap(mm_inputs, sink_tokens), delta
    table = mm_inputs.mrope_positions
    return replace(
        mm_inputs,
        mrope_positions=torch.cat([table[:, :sink_tokens], table[:, sink_tokens:] - delta], dim=1),
        mrope_position_delta=mm_inputs.mrope_position_delta - delta,
        mrope_position_delta_repeated_cache=None,
    )


def _span(item: MultimodalDataItem) -> tuple[int, int]:
    """Half-open span around all runs of the item's tokens; an offset is (first, last) of a run."""
    return min(first for first, _ in item.offsets), max(last for _, last in item.offsets) + 1


def _compact_items(
    items: list[MultimodalDataItem], compaction: Compaction
) -> list[MultimodalDataItem]:
    kept: list[MultimodalDataItem] = []
    dropped: list[MultimodalDataItem] = []
    begin, end, n_tokens = compaction.begin, compaction.end, compaction.n_tokens
    for item in items:
        # A clip too short for one token has no offsets.
        first, behind = _span(item) if item.offsets else (0, 0)
        inside = begin <= first and behind <= end
        assert inside or behind <= begin or end <= first, (compaction, item.offsets)
        if first >= end:
            item.offsets = [(a - n_tokens, b - n_tokens) for a, b in item.offsets]
        (dropped if inside else kept).append(item)
    MultimodalInputs(mm_items=dropped).release_features()
    return kept


def _whole_table(mm_inputs: MultimodalInputs, n_tokens: int) -> Tensor:
    """Positions of all tokens of the session, as SGLang has computed them, [3, n_tokens].

    SGLang's table ends with the last prompt that had media, or beyond the session if a request
    was retracted. The positions of later text continue from its end.
    """
    table = mm_inputs.mrope_positions[:, :n_tokens]
    places = torch.arange(table.shape[1], n_tokens, device=table.device)
    text = places + mm_inputs.mrope_position_delta.flatten()
    return torch.cat([table, text.expand(3, -1)], dim=1)


def _text(n_tokens: int) -> MultimodalInputs:
    return MultimodalInputs(
        mm_items=[],
        mrope_positions=torch.arange(n_tokens).expand(3, -1),
        mrope_position_delta=torch.zeros(1, 1, dtype=torch.int64),
    )
