"""The talker's requests: one without text for its next frame is blocked.

Blocking belongs to the model, not to a policy: the input of the step does not exist yet. With all
policies off it is the only addition to SGLang's loop.
"""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.session.streaming_session import StreamingSession

from sglang_live.bridge.scheduler.codes_observer import CodesObserver
from sglang_live.bridge.scheduler.part import Part, Prefill
from sglang_live.bridge.scheduler.talker_cache import TalkerCache
from sglang_live.bridge.scheduler.talker_input import PromptStates
from sglang_live.bridge.session.compact import compact_row, shorten
from sglang_live.engine_channel.inbox import OUTBOX_ENV, Outbox, address_from_env
from sglang_live.ids import SPEECH_PREFIXES
from sglang_live.kv.retention import Compaction, RetentionConfig, compaction_of
from sglang_live.messages import ForgetStates, TalkerForget, TalkerPrompt, TalkerStates, TalkerText
from sglang_live.models.speech_lm.talker_state import TalkerStream

if TYPE_CHECKING:
    from sglang_live.bridge.scheduler.live import LiveScheduler


class Talker(Part):
    """
    Attributes:
        unfinished_text: requests whose text is incomplete; only these can be blocked.
        model: of the engine.
    """

    def __init__(self, scheduler: "LiveScheduler"):
        super().__init__(scheduler)
        self.unfinished_text: set[str] = set()
        self._states = PromptStates()
        # Codes 0 of requests that other engines have begun, until their prefill.
        self._begun: dict[str, list[int]] = {}

    def start(self) -> None:
        scheduler = self._scheduler
        runner: ModelRunner = scheduler.tp_worker.model_runner
        self.model = runner.model
        if isinstance(getattr(scheduler.tree_cache, "session", None), StreamingSession):
            scheduler.tree_cache.session = TalkerCache(scheduler.tree_cache)
        n_rows = scheduler.req_to_token_pool.req_to_token.shape[0]
        if n_rows > len(self.model.rows.prompt_len):
            raise RuntimeError(
                f"{n_rows} request rows, the model has {len(self.model.rows.prompt_len)}"
            )
        if scheduler.is_first_rank:
            outbox = Outbox(address_from_env(OUTBOX_ENV))
            runner.sampling_observer = CodesObserver(self.model, outbox)

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {
            TalkerPrompt: self._on_prompt,
            TalkerStates: self._states.take,
            ForgetStates: self._states.forget,
            TalkerText: self._on_text,
            TalkerForget: self._on_forget,
        }

    def _on_prompt(self, prompt: TalkerPrompt) -> None:
        stream = self.model.streams[prompt.rid] = self._states.stream_of(prompt)
        if stream.begun is not None:
            self._begun[prompt.rid] = stream.begun[:, 0].tolist()
        self.unfinished_text.add(prompt.rid)

    def _on_text(self, text: TalkerText) -> None:
        stream = self.model.streams.get(text.rid)
        if stream is not None:
            stream.text_ids.extend(text.heard or text.ids)
            stream.text_done = stream.text_done or text.done
            if stream.text_done:
                self.unfinished_text.discard(text.rid)

    def _on_forget(self, forget: TalkerForget) -> None:
        self.model.streams.pop(forget.rid, None)
        self._begun.pop(forget.rid, None)
        self.unfinished_text.discard(forget.rid)

    # --- blocked requests ---

    def may_block(self) -> bool:
        return bool(self.unfinished_text)

    def blocks(self, req: Req) -> bool:
        if req.rid not in self.unfinished_text:
            return False
        # KV beyond the prompt has one entry per launched frame, also while a step is in flight.
        return not self._has_text(req, req.kv.kv_committed_len)

    def lacks_input(self, req: Req) -> bool:
        # The request may arrive before its announcement, which comes on another socket.
        return self._is_unannounced(req) or self._lacks_text(req)

    def _lacks_text(self, req: Req) -> bool:
        """Whether a retracted request waits for the text of its newest frame, which is prefilled
        with the others.
        """
        if req.rid not in self.unfinished_text or req.to_finish is not None:
            return False
        return not self._has_text(req, len(req.origin_input_ids) + len(req.output_ids) - 1)

    def _has_text(self, req: Req, place: int) -> bool:
        """For the step that computes the KV of a place."""
        stream = self.model.streams[req.rid]
        if place < stream.prompt_len:
            return True
        frame = stream.frame_at(place)
        if stream.block < 0:
            return stream.has_text_for(frame)
        # What is taken up to this frame. A step in flight may have drawn that text is next.
        known = req.output_ids[: frame + 1]
        n_taken = known.count(self.model.fill_id) + frame + 1 - len(known)
        return stream.has_text_for(n_taken - 1)

    def _is_unannounced(self, req: Req) -> bool:
        if not req.rid.startswith(SPEECH_PREFIXES) or req.rid in self.model.streams:
            return False
        # A request that was announced and forgotten must leave the queue in order to end.
        return req.to_finish is None and not req.retracted_stain

    # --- the model's rows ---

    def before_launch(self, batch: ScheduleBatch) -> None:
        is_extend = batch.forward_mode.is_extend()
        with self._behind_the_step_in_flight():
            for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
                stream = self.model.streams.get(req.rid)
                if stream is None:
                    continue
                if stream.row != req.kv.req_pool_idx:
                    self.model.rows.bind(stream, req.kv.req_pool_idx)
                else:
                    self.model.rows.refresh(stream)
                # A batch that decodes may keep the request whose chunk it was built with.
                stream.mid_prefill = is_extend and req is batch.chunked_req
                # With a lag a prefill completes no frame; without, only its last chunk does.
                if not (is_extend if self.model.row_lag else stream.mid_prefill):
                    stream.n_frames = stream.frame_at(seq_len - self.model.row_lag) + 1

    def _behind_the_step_in_flight(self) -> AbstractContextManager[Any]:
        """With overlap, the step in flight reads the rows on its own CUDA stream."""
        scheduler = self._scheduler
        return scheduler.forward_stream_ctx if scheduler.enable_overlap else nullcontext()

    def queues(self, req: Req, is_retracted: bool) -> None:
        stream = self.model.streams.get(req.rid)
        if is_retracted and stream is not None:
            with self._behind_the_step_in_flight():
                self.model.rows.unbind(stream)
            _keep_apart(req)

    def before_prefill(self, running_batch: ScheduleBatch) -> None:
        """Requests that another engine has begun become as if this one had retracted them."""
        for req in self._scheduler.waiting_queue if self._begun else ():
            if (codes := self._begun.pop(req.rid, None)) is not None:
                req.output_ids.extend(codes)
                req.retracted_stain = True
                _keep_apart(req)


def _keep_apart(req: Req) -> None:
    # Code 0 alone does not determine a frame's KV, so it must not match other requests.
    req.extra_key = f"{req.extra_key or ''}{req.rid}"


class TalkerWindow(Part):
    """Compaction of long requests while they decode.

    A request keeps its prompt, which holds the user's turn and the voice, and a window of its
    newest frames; whole pages between the two are dropped. Positions stay as computed, as in a
    session. Owner: one per talker's scheduler; equal on all ranks.
    """

    def __init__(self, scheduler: "LiveScheduler", talker: Talker):
        super().__init__(scheduler)
        self._talker = talker
        self._configs: dict[str, RetentionConfig] = {}
        # Each request's own max_new_tokens, which is replaced by a bound on frames in KV.
        self._limits: dict[str, int] = {}
        self._counts = {"replies_compacted": 0.0, "frames_compacted": 0.0}

    def totals(self) -> dict[str, float]:
        return self._counts

    def handlers(self) -> dict[type, Callable[[Any], Any]]:
        return {TalkerPrompt: self.announce, TalkerForget: self._on_forget}

    def announce(self, prompt: TalkerPrompt) -> None:
        if prompt.window_frames:
            self._configs[prompt.rid] = RetentionConfig(
                sink_tokens=prompt.prompt_len,
                window_tokens=prompt.window_frames,
                slack_tokens=prompt.slack_frames,
            )

    def _on_forget(self, forget: TalkerForget) -> None:
        self._configs.pop(forget.rid, None)
        self._limits.pop(forget.rid, None)

    def narrow(self, prefill: Prefill) -> None:
        """Set max_new_tokens to the bound, so that SGLang reserves no more memory than that."""
        if len(self._limits) == len(self._configs):
            return
        for req in prefill.queue:
            if req.rid in self._configs and req.rid not in self._limits:
                self._limits[req.rid] = req.sampling_params.max_new_tokens
                self._set_limit(req)

    def before_decode(self, batch: ScheduleBatch) -> None:
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
    def _streams(self) -> dict[str, TalkerStream]:
        streams: dict[str, TalkerStream] = self._talker.model.streams
        return streams

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
        self._counts["replies_compacted"] += 1
        self._counts["frames_compacted"] += compaction.n_tokens
        self._scheduler.compacted(req.rid, compaction.n_tokens)

    def _set_limit(self, req: Req) -> None:
        config, stream = self._configs[req.rid], self._streams[req.rid]
        most = config.most_frames(self._page_size)
        if self._talker.model.rows.is_ring:  # nothing but its consumer ends it
            req.sampling_params.max_new_tokens = most
            return
        n_positions = self._scheduler.model_config.context_len - 1 - stream.prompt_len
        left = min(self._talker.model.rows.max_frames, n_positions) - stream.n_dropped
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
