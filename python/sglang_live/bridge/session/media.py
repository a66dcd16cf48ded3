"""Audio, images and positions of a session from which tokens are cut.

A request carries MultimodalInputs of its whole session: items that say where their tokens are,
and for models with M-RoPE a table of positions. Both count in tokens that are there, while the
positions in the table are absolute, and what is kept in the KV cache was computed with them.

Of the other fields, padded_input_ids is read only while the request that brought it is taken in,
and the token ids have no place.
"""

from dataclasses import replace

import torch
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalInputs
from torch import Tensor

from sglang_live.kv.retention import Compaction

# Fields of other models that count in tokens as well; Qwen3-Omni has none of them.
_NOT_CUT = (
    "image_pad_len",
    "num_image_tokens",
    "token_modalities",
    "vision_position_ids",
    "visible_frame_counts",
)


def media_spans(mm_inputs: MultimodalInputs | None) -> list[tuple[int, int]]:
    """Half-open spans of tokens that only leave together: ascending, without overlap."""
    spans: list[tuple[int, int]] = []
    items = mm_inputs.mm_items if mm_inputs is not None else []
    for first, behind in sorted(_span(item) for item in items if item.offsets):
        if spans and first < spans[-1][1]:
            # Items with several runs of tokens each, one between the other's.
            spans[-1] = spans[-1][0], max(behind, spans[-1][1])
        else:
            spans.append((first, behind))
    return spans


def compact_media(
    mm_inputs: MultimodalInputs | None, cut: Compaction, n_tokens: int
) -> MultimodalInputs:
    """What takes the place of mm_inputs when the tokens of the cut leave the session.

    Items inside the cut lose their features; the others are moved in place. Tokens that stay keep
    their positions, and those that will follow get the ones they would have had.

    Args:
        mm_inputs: of the session's last request, which has finished. None: there was text only,
            and the model has M-RoPE; from now on its positions need a table as well.
        cut: splits none of media_spans(), and is not the end of the session.
        n_tokens: tokens of the session before the cut, replies included.
    """
    assert 0 <= cut.begin < cut.end < n_tokens, (cut, n_tokens)
    if mm_inputs is None:
        mm_inputs = _text(n_tokens)
    alien = [name for name in _NOT_CUT if getattr(mm_inputs, name) is not None]
    assert not alien, f"sessions of a model that needs {alien} cannot be cut"
    after = replace(mm_inputs, mm_items=_cut_items(mm_inputs.mm_items, cut))
    if mm_inputs.mrope_positions is not None:
        table = _whole_table(mm_inputs, n_tokens)
        after.mrope_positions = torch.cat([table[:, : cut.begin], table[:, cut.end :]], dim=1)
        after.mrope_position_delta = mm_inputs.mrope_position_delta + cut.n_tokens
        after.mrope_position_delta_repeated_cache = None
    return after


def media_before(mm_inputs: MultimodalInputs, n_tokens: int) -> MultimodalInputs:
    """What takes the place of mm_inputs when the session is cut back to its first n_tokens.

    n_tokens: splits none of media_spans().
    """
    kept, dropped = [], []
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
        # Text counts on from the last position that is left.
        delta = int(table[:, n_tokens - 1].max()) + 1 - n_tokens
        after.mrope_position_delta = torch.full_like(mm_inputs.mrope_position_delta, delta)
        after.mrope_position_delta_repeated_cache = None
    return after


def position_gap(mm_inputs: MultimodalInputs, sink_tokens: int) -> int:
    """Positions between a session's sink and what follows it, which no token has any more.

    Fewer than the tokens that were cut if there were images among them: all tokens of an image
    share a few positions.
    """
    table = mm_inputs.mrope_positions
    assert 0 <= sink_tokens < table.shape[1], (sink_tokens, table.shape)
    if sink_tokens == 0:
        return int(table.min())
    return int(table[:, sink_tokens:].min() - table[:, :sink_tokens].max()) - 1


def shift_positions(
    mm_inputs: MultimodalInputs, delta: int, *, sink_tokens: int
) -> MultimodalInputs:
    """What takes the place of mm_inputs when keys behind the sink are rebased by `delta`.

    Args:
        mm_inputs: of a session that has been cut behind its first sink_tokens.
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
    """Around all runs of the item's tokens; each is given by its first and its last."""
    return min(first for first, _ in item.offsets), max(last for _, last in item.offsets) + 1


def _cut_items(items: list[MultimodalDataItem], cut: Compaction) -> list[MultimodalDataItem]:
    kept, dropped = [], []
    for item in items:
        # A clip too short for one token has no place, and nothing to lose.
        first, behind = _span(item) if item.offsets else (0, 0)
        inside = cut.begin <= first and behind <= cut.end
        assert inside or behind <= cut.begin or cut.end <= first, (cut, item.offsets)
        if first >= cut.end:
            item.offsets = [(a - cut.n_tokens, b - cut.n_tokens) for a, b in item.offsets]
        (dropped if inside else kept).append(item)
    MultimodalInputs(mm_items=dropped).release_features()
    return kept


def _whole_table(mm_inputs: MultimodalInputs, n_tokens: int) -> Tensor:
    """[3, n_tokens]: positions of all tokens of the session, as SGLang has computed them.

    Its table ends with the last prompt that brought media, or beyond the session where a request
    was retracted. Text that follows counts on from there.
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
