"""The talker's scheduler: a request without text for its next frame is blocked.

Blocking belongs to the model, not to a policy: the input of the step does not exist yet. With all
policies off it is the only addition to SGLang's loop.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.session.streaming_session import StreamingSession
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.scheduler.codes_observer import CodesObserver
from sglang_live.bridge.scheduler.live import LiveScheduler
from sglang_live.bridge.scheduler.talker_cache import TalkerCache
from sglang_live.bridge.scheduler.talker_input import PromptStates
from sglang_live.bridge.scheduler.talker_window import TalkerWindow
from sglang_live.engine_channel.inbox import OUTBOX_ENV, Outbox, address_from_env
from sglang_live.engine_channel.messages import (
    SPEECH_PREFIXES,
    ForgetStates,
    TalkerForget,
    TalkerPrompt,
    TalkerStates,
    TalkerText,
)
from sglang_live.policy.config import TALKER


class TalkerScheduler(LiveScheduler):
    policy_config = TALKER
    kv_by_tokens = False  # a frame's KV comes from all of its codes, and from text

    # --- setting up ---

    def init_running_status(self) -> None:
        super().init_running_status()
        # Requests whose text is incomplete; only these can be blocked.
        self.unfinished_text: set[str] = set()
        runner: ModelRunner = self.tp_worker.model_runner
        self.model = runner.model
        self.window = TalkerWindow(self, self.model.streams)
        if isinstance(getattr(self.tree_cache, "session", None), StreamingSession):
            self.tree_cache.session = TalkerCache(self.tree_cache)
        n_rows = self.req_to_token_pool.req_to_token.shape[0]
        if n_rows > len(self.model.rows.prompt_len):
            raise RuntimeError(
                f"{n_rows} request rows, the model has {len(self.model.rows.prompt_len)}"
            )
        if self.ipc_channels.recv_from_tokenizer is not None:
            runner.sampling_observer = CodesObserver(
                self.model, Outbox(address_from_env(OUTBOX_ENV))
            )

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self.states = PromptStates()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (TalkerPrompt, self._on_prompt),
                (TalkerStates, self.states.take),
                (ForgetStates, self.states.forget),
                (TalkerText, self._on_text),
                (TalkerForget, self._on_forget),
            ]
        )

    # --- feed messages ---

    def _on_prompt(self, prompt: TalkerPrompt) -> None:
        self.model.streams[prompt.rid] = self.states.stream_of(prompt)
        self.unfinished_text.add(prompt.rid)
        self.window.announce(prompt)

    def _on_text(self, text: TalkerText) -> None:
        stream = self.model.streams.get(text.rid)
        if stream is not None:
            stream.text_ids.extend(text.ids)
            stream.text_done = stream.text_done or text.done
            if stream.text_done:
                self.unfinished_text.discard(text.rid)

    def _on_forget(self, forget: TalkerForget) -> None:
        self.model.streams.pop(forget.rid, None)
        self.unfinished_text.discard(forget.rid)
        self.window.forget(forget.rid)

    # --- blocked requests ---

    def _any_blocked(self) -> bool:
        return bool(self.unfinished_text)

    def _blocked(self, req: Req) -> bool:
        if req.rid not in self.unfinished_text:
            return False
        # KV beyond the prompt has one entry per launched frame, also while a step is in flight.
        stream, place = self.model.streams[req.rid], req.kv.kv_committed_len
        return place >= stream.prompt_len and not stream.has_text_for(stream.frame_at(place))

    def _admission_order(self, waiting: list[Req]) -> tuple[list[Req], list[Req]]:
        early = [req for req in waiting if self._lacks_input(req)]
        ready = [req for req in waiting if not self._lacks_input(req)] if early else waiting
        self.window.limit(ready)
        queue, later = super()._admission_order(ready)
        return queue, later + early

    def _retract_for(self, waiting: list[Req], running_batch: ScheduleBatch) -> None:
        super()._retract_for([r for r in waiting if not self._lacks_input(r)], running_batch)

    def _awaits_input(self) -> bool:
        queue = self.waiting_queue
        return super()._awaits_input() or (bool(queue) and all(map(self._lacks_input, queue)))

    def _lacks_input(self, req: Req) -> bool:
        """Whether a waiting request cannot be prefilled yet."""
        # The request may arrive before its announcement, which comes on another socket.
        return self._is_unannounced(req) or self._lacks_text(req)

    def _lacks_text(self, req: Req) -> bool:
        """Whether a retracted request waits for the text of its newest frame, which is prefilled
        with the others.
        """
        if req.rid not in self.unfinished_text or req.to_finish is not None:
            return False
        stream = self.model.streams[req.rid]
        place = len(req.origin_input_ids) + len(req.output_ids) - 1
        return place >= stream.prompt_len and not stream.has_text_for(stream.frame_at(place))

    def _is_unannounced(self, req: Req) -> bool:
        if not req.rid.startswith(SPEECH_PREFIXES) or req.rid in self.model.streams:
            return False
        # A request that was announced and forgotten must leave the queue in order to end.
        return req.to_finish is None and not req.retracted_stain

    # --- the model's rows ---

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self.window.bound(batch)
        return super().update_running_batch(batch)

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
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
                stream.mid_prefill = req is batch.chunked_req
                if not is_extend:
                    stream.n_frames = stream.frame_at(seq_len - 1) + 1
        return super().run_batch(batch, *args, **kwargs)

    def _behind_the_step_in_flight(self) -> AbstractContextManager[Any]:
        """With overlap, the step in flight reads the rows on its own CUDA stream."""
        return self.forward_stream_ctx if self.enable_overlap else nullcontext()

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        stream = self.model.streams.get(req.rid)
        if is_retracted and stream is not None:
            with self._behind_the_step_in_flight():
                self.model.rows.unbind(stream)
            # Code 0 alone does not determine a frame's KV, so it must not match other requests.
            req.extra_key = f"{req.extra_key or ''}{req.rid}"
        super()._add_request_to_queue(req, is_retracted)

    # --- reports ---

    def _totals(self) -> dict[str, float]:
        return super()._totals() | self.window.totals
