"""SGLang's scheduler for the talker: a stream that has no text for its next frame sits out.

That gate is part of the model (the input of the step does not exist yet), not a policy: it is
the only thing this class adds, and without a starved stream every round is SGLang's own.
"""

import zmq
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.utils import TypeBasedDispatcher

from sglang_live.bridge.codes_observer import CodesObserver
from sglang_live.bridge.feed_types import (
    SPEAK_PREFIX,
    TalkerForget,
    TalkerPrompt,
    TalkerText,
)
from sglang_live.bridge.held import ReqsView, decode_batch_of
from sglang_live.bridge.inbox import INBOX_ENV, OUTBOX_ENV, Inbox, Outbox, address_from_env
from sglang_live.bridge.talker_feed import stream_of

# How long a round may wait for input when every stream sits out. Text ends the wait at once.
IDLE_WAIT_MS = 20


class TalkerScheduler(Scheduler):
    # --- setting up ---

    def init_ipc_channels(self, port_args) -> None:
        super().init_ipc_channels(port_args)
        self.inbox: Inbox | None = None
        self._starved_poller = zmq.Poller()
        if self.ipc_channels.recv_from_tokenizer is not None:  # rank 0 only
            self.inbox = Inbox(address_from_env(INBOX_ENV))
            self._starved_poller.register(self.inbox.socket, zmq.POLLIN)
            self._starved_poller.register(self.ipc_channels.recv_from_tokenizer, zmq.POLLIN)

    def init_idle_sleeper(self) -> None:
        super().init_idle_sleeper()
        if self.idle_sleeper is not None and self.inbox is not None:
            self.idle_sleeper.poller.register(self.inbox.socket, zmq.POLLIN)

    def init_running_status(self) -> None:
        super().init_running_status()
        self.held: dict[str, Req] = {}
        runner: ModelRunner = self.tp_worker.model_runner
        self.model = runner.model
        n_rows = self.req_to_token_pool.req_to_token.shape[0]
        if n_rows > len(self.model.rows.prompt_len):
            raise RuntimeError(
                f"{n_rows} request rows, room for {len(self.model.rows.prompt_len)} streams"
            )
        if self.ipc_channels.recv_from_tokenizer is not None:
            runner.sampling_observer = CodesObserver(
                self.model, Outbox(address_from_env(OUTBOX_ENV))
            )

    def init_request_dispatcher(self) -> None:
        super().init_request_dispatcher()
        self._request_dispatcher += TypeBasedDispatcher(
            [
                (TalkerPrompt, self._on_prompt),
                (TalkerText, self._on_text),
                (TalkerForget, self._on_forget),
            ]
        )

    def init_pool_stats_observer(self) -> None:
        super().init_pool_stats_observer()
        self._count_held(self.pool_stats_observer)

    def init_invariant_checker(self) -> None:
        super().init_invariant_checker()
        self._count_held(self.invariant_checker)

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self._count_held(self.load_inquirer)

    def _count_held(self, observer) -> None:
        # Frozen dataclasses: what they observe is fixed at construction, but for this.
        object.__setattr__(observer, "get_running_batch", self._running_and_held)

    def _running_and_held(self):
        if not self.held:
            return self.running_batch
        return ReqsView([*self.running_batch.reqs, *self.held.values()])

    # --- facts from the stage ---

    def _poll_timeout_aborts(self) -> list:
        # Called on rank 0 only; what it returns is broadcast with the requests of the round.
        feeds = self.inbox.drain() if self.inbox is not None else []
        return [*feeds, *super()._poll_timeout_aborts()]

    def _on_prompt(self, prompt: TalkerPrompt) -> None:
        self.model.streams[prompt.rid] = stream_of(prompt)

    def _on_text(self, text: TalkerText) -> None:
        stream = self.model.streams.get(text.rid)
        if stream is not None:
            stream.text_ids.extend(text.ids)
            stream.text_done = stream.text_done or text.done

    def _on_forget(self, forget: TalkerForget) -> None:
        self.model.streams.pop(forget.rid, None)

    # --- the gate ---

    def _starved(self, req: Req) -> bool:
        if req.finished() or req.to_finish is not None:
            return False
        stream = self.model.streams.get(req.rid)
        if stream is None:
            return False
        # KV beyond the prompt counts the frames already launched, also while a step is in flight.
        frame = req.kv.kv_committed_len - len(req.origin_input_ids)
        return frame >= 0 and not stream.has_text_for(frame)

    def _hold_starved(self, batch: ScheduleBatch) -> None:
        starved = [self._starved(req) for req in batch.reqs]
        if not any(starved):
            return
        for req, sits_out in zip(batch.reqs, starved, strict=True):
            if sits_out:
                self.held[req.rid] = req
        batch.filter_batch(keep_indices=[i for i, s in enumerate(starved) if not s])
        batch.batch_is_full = False

    def _resume(self, running_batch: ScheduleBatch) -> ScheduleBatch:
        for req in [r for r in self.held.values() if not self._starved(r)]:
            if req.finished():
                # With overlap it may end in the step that was in flight when it was held.
                del self.held[req.rid]
                continue
            if len(req.origin_input_ids) + len(req.output_ids) - 1 != req.kv.kv_committed_len:
                continue  # its last step is still in flight
            del self.held[req.rid]
            batch = decode_batch_of(self, req)
            if running_batch.is_empty():
                batch.batch_is_full = running_batch.batch_is_full
                running_batch = batch
            else:
                running_batch.merge_batch(batch)
        return running_batch

    def get_next_batch_to_run(self, running_batch, last_batch) -> NextBatchPlan:
        if self.held:
            running_batch = self._resume(running_batch)
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        if plan.batch_to_run is None and self.held and last_batch is None:
            self._starved_poller.poll(IDLE_WAIT_MS)
        return plan

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        self._hold_starved(running_batch)
        # The request may overtake its announcement, which travels on another socket.
        early = [req for req in self.waiting_queue if self._is_unannounced(req)]
        if not early:
            return super().get_new_batch_prefill(running_batch)
        self.waiting_queue = [req for req in self.waiting_queue if req not in early]
        plan = super().get_new_batch_prefill(running_batch)
        self.waiting_queue.extend(early)
        return plan

    def _is_unannounced(self, req: Req) -> bool:
        return req.rid.startswith(SPEAK_PREFIX) and req.rid not in self.model.streams

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        self._hold_starved(batch)  # rounds in which prefill was deferred
        if batch.is_empty():
            return batch
        return super().update_running_batch(batch)

    # --- rows of the model ---

    def run_batch(self, batch: ScheduleBatch, *args, **kwargs):
        is_extend = batch.forward_mode.is_extend()
        for req, seq_len in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            stream = self.model.streams.get(req.rid)
            if stream is None:
                continue
            if stream.row != req.kv.req_pool_idx:
                self.model.rows.bind(stream, req.kv.req_pool_idx)
            else:
                self.model.rows.write_text(stream)
            stream.mid_prefill = req is batch.chunked_req
            if not is_extend:
                stream.n_frames = seq_len - stream.prompt_len
        return super().run_batch(batch, *args, **kwargs)

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        stream = self.model.streams.get(req.rid)
        if is_retracted and stream is not None:
            self.model.rows.unbind(stream)
            # Code 0 does not determine a frame's KV: never match another reply's frames.
            req.extra_key = f"{req.extra_key or ''}{req.rid}"
        super()._add_request_to_queue(req, is_retracted)

    # --- everybody who counts live requests ---

    def collect_inflight_reqs(self) -> set[Req]:
        return super().collect_inflight_reqs() | set(self.held.values())

    def is_fully_idle(self, for_health_check=False, ignore_waiting=False) -> bool:
        return not self.held and super().is_fully_idle(for_health_check, ignore_waiting)
