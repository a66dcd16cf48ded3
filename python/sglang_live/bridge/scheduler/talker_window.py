"""Replies that go on and on: while one is spoken, what it said long ago leaves its KV.

Its prompt stays, which says whom it answers and with whose voice, and so does a window of its
newest frames; whole pages between the two go. Positions stay logical, as in a session's cut.
In: TalkerPrompt. Out: shorter requests. Owner: one ReplyBounds per talker's scheduler; equal on
all ranks, because all it hears is broadcast.
"""

from array import array

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.session.row_compact import compact_row, shorten
from sglang_live.engine_channel.messages import TalkerPrompt
from sglang_live.kv.retention import Compaction, RetentionConfig, compaction_of
from sglang_live.models.qwen3_omni.talker_state import TalkerStream


class ReplyBounds:
    """
    Args:
        streams: by request id; a cut is noted there.
    """

    def __init__(self, scheduler, streams: dict[str, TalkerStream]):
        self._scheduler, self._streams = scheduler, streams
        self._configs: dict[str, RetentionConfig] = {}
        self._limits: dict[str, int] = {}  # SGLang's, for the frames that lie in KV at once
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
        """To SGLang a bounded reply is as long as its bound: it asks for no more room than that."""
        if len(self._limits) == len(self._configs):
            return
        for req in waiting:
            if req.rid in self._configs and req.rid not in self._limits:
                self._limits[req.rid] = req.sampling_params.max_new_tokens
                self._set_limit(req)

    def bound(self, batch: ScheduleBatch) -> None:
        for index, req in enumerate(batch.reqs if self._configs else ()):
            config = self._configs.get(req.rid)
            if config is None or req.finished() or not self._is_over(req, config):
                continue
            cut = compaction_of(
                n_tokens=req.kv.kv_committed_len,
                sink_tokens=config.sink_tokens,
                window_tokens=config.window_tokens,
                page_size=self._page_size,
                owned_from=req.kv.cache_protected_len,
                media=(),
                slack_tokens=config.slack_tokens,
            )
            if cut is not None:
                self._drop(req, cut)
                shorten(batch, index, cut.n_tokens)

    @property
    def _page_size(self) -> int:
        return self._scheduler.page_size

    def _is_over(self, req: Req, config: RetentionConfig) -> bool:
        if len(req.output_ids) >= req.sampling_params.max_new_tokens:
            return False  # told to end
        bound = config.sink_tokens + config.window_tokens + config.slack_tokens
        return req.kv.kv_committed_len > bound + 2 * self._page_size

    def _drop(self, req: Req, cut: Compaction) -> None:
        assert req.kv.cache_protected_len <= cut.begin  # what the tree holds is the prompt's
        compact_row(self._scheduler.tree_cache, req.kv, cut, cut.begin)
        _drop_outputs(req, cut)
        self._streams[req.rid].drop(cut.begin, cut.n_tokens)
        self._set_limit(req)
        self.totals["replies_compacted"] += 1
        self.totals["frames_compacted"] += cut.n_tokens
        if self._scheduler.rounds is not None:
            self._scheduler.rounds.table.shrank(req.rid, cut.n_tokens)

    def _set_limit(self, req: Req) -> None:
        config, stream = self._configs[req.rid], self._streams[req.rid]
        # It is cut before it comes to this.
        most = config.window_tokens + config.slack_tokens + 3 * self._page_size + 8
        n_positions = self._scheduler.model_config.context_len - 1 - stream.prompt_len
        left = min(self._scheduler.model.rows.max_frames, n_positions) - stream.n_dropped
        req.sampling_params.max_new_tokens = min(most, left, self._limits[req.rid])


def _drop_outputs(req: Req, cut: Compaction) -> None:
    """So that tokens and KV go on agreeing; all that is dropped was sent long ago."""
    first = cut.begin - len(req.origin_input_ids)
    end = first + cut.n_tokens
    assert end <= req.send_token_offset, (end, req.send_token_offset)
    del req.output_ids[first:end]
    # Where SGLang's stream of tokens has come to.
    req.send_token_offset -= cut.n_tokens
    req.cur_decode_ids_len -= cut.n_tokens
    # Rebuilt when it is needed.
    req.full_untruncated_fill_ids = array("q")
