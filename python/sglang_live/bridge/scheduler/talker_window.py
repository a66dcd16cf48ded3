"""Compaction of long talker requests while they decode.

A request keeps its prompt, which holds the user's turn and the voice, and a window of its newest
frames; whole pages between the two are dropped. Positions stay as computed, as in a session.
In: TalkerPrompt. Out: shorter requests. Owner: one TalkerWindow per talker's scheduler; equal on
all ranks, because its inputs are broadcast.
"""

from array import array
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.session.compact import compact_row, shorten
from sglang_live.engine_channel.messages import TalkerPrompt
from sglang_live.kv.retention import Compaction, RetentionConfig, compaction_of
from sglang_live.models.speech_lm.streams import TalkerStream


class TalkerWindow:
    """
    Args:
        streams: by request id; compactions are recorded in them.
    """

    def __init__(self, scheduler: Any, streams: dict[str, TalkerStream]):
        self._scheduler, self._streams = scheduler, streams
        self._configs: dict[str, RetentionConfig] = {}
        # Each request's own max_new_tokens, which is replaced by a bound on frames in KV.
        self._limits: dict[str, int] = {}
        self.totals = {"replies_compacted": 0.0, "frames_compacted": 0.0}

    def announce(self, prompt: TalkerPrompt) -> None:
        if prompt.window_frames:
            self._configs[prompt.rid] = RetentionConfig(
                sink_tokens=prompt.prompt_len,
                window_tokens=prompt.window_frames,
                slack_tokens=prompt.slack_frames,
            )

    def forget(self, rid: str) -> None:
        self._configs.pop(rid, None)
        self._limits.pop(rid, None)

    def limit(self, waiting: list[Req]) -> None:
        """Set max_new_tokens to the bound, so that SGLang reserves no more memory than that."""
        if len(self._limits) == len(self._configs):
            return
        for req in waiting:
            if req.rid in self._configs and req.rid not in self._limits:
                self._limits[req.rid] = req.sampling_params.max_new_tokens
                self._set_limit(req)

    def bound(self, batch: ScheduleBatch) -> None:
        """Compact the requests of a decode batch that exceed their bound."""
        for index, req in enumerate(batch.reqs if self._configs else ()):
            config = self._configs.get(req.rid)
            if config is None or req.finished() or not self._is_over(req, config):
                continue
            compaction = compaction_of(
                n_tokens=req.kv.kv_committed_len,
                sink_tokens=_sink_tokens(config),
                window_tokens=config.window_tokens,
                page_size=self._page_size,
                owned_from=req.kv.cache_protected_len,
                media=(),
                slack_tokens=config.slack_tokens,
            )
            if compaction is not None:
                self._compact(req, compaction)
                shorten(batch, index, compaction.n_tokens)

    @property
    def _page_size(self) -> int:
        return self._scheduler.page_size

    def _is_over(self, req: Req, config: RetentionConfig) -> bool:
        if len(req.output_ids) >= req.sampling_params.max_new_tokens:
            return False  # interrupted
        bound = _sink_tokens(config) + config.window_tokens + config.slack_tokens
        n_tokens: int = req.kv.kv_committed_len
        return n_tokens > bound + 2 * self._page_size

    def _compact(self, req: Req, compaction: Compaction) -> None:
        # The tree holds tokens of the prompt only.
        assert req.kv.cache_protected_len <= compaction.begin
        compact_row(self._scheduler.tree_cache, req.kv, compaction, compaction.begin)
        _drop_outputs(req, compaction)
        self._streams[req.rid].drop(compaction.begin, compaction.n_tokens)
        self._set_limit(req)
        self.totals["replies_compacted"] += 1
        self.totals["frames_compacted"] += compaction.n_tokens
        if self._scheduler.rounds is not None:
            self._scheduler.rounds.table.compacted(req.rid, compaction.n_tokens)

    def _set_limit(self, req: Req) -> None:
        config, stream = self._configs[req.rid], self._streams[req.rid]
        # Compaction comes first, so a running request never reaches this limit.
        most = config.window_tokens + config.slack_tokens + 3 * self._page_size + 8
        n_positions = self._scheduler.model_config.context_len - 1 - stream.prompt_len
        left = min(self._scheduler.model.rows.max_frames, n_positions) - stream.n_dropped
        req.sampling_params.max_new_tokens = min(most, left, self._limits[req.rid])


def _sink_tokens(config: RetentionConfig) -> int:
    assert config.sink_tokens is not None  # announce() sets it
    return config.sink_tokens


def _drop_outputs(req: Req, compaction: Compaction) -> None:
    """Drop the output tokens of the dropped KV. They have been sent already."""
    first = compaction.begin - len(req.origin_input_ids)
    end = first + compaction.n_tokens
    assert end <= req.send_token_offset, (end, req.send_token_offset)
    del req.output_ids[first:end]
    # SGLang's offsets of sent and detokenized outputs.
    req.send_token_offset -= compaction.n_tokens
    req.cur_decode_ids_len -= compaction.n_tokens
    # SGLang rebuilds it on use.
    req.full_untruncated_fill_ids = array("q")
