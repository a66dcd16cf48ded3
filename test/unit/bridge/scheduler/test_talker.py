"""Blocked requests of the talker, without an engine: fakes replace the rest of the scheduler."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_live.bridge.scheduler.paused import PausedRequest
from sglang_live.bridge.scheduler.talker import Talker
from sglang_live.bridge.scheduler.talker_input import PromptStates
from sglang_live.ids import SPEAK_PREFIX
from sglang_live.messages import TalkerPrompt
from test.unit.bridge.scheduler.fake_scheduler import FakeScheduler


class FakeReq:
    def __init__(self, rid: str, n_prompt: int, n_launched: int, n_output: int):
        self.rid = rid
        self.origin_input_ids = [0] * n_prompt
        self.output_ids = [0] * n_output
        self.kv = SimpleNamespace(kv_committed_len=n_prompt + n_launched)
        self.to_finish = None
        self.sampling_params = SimpleNamespace(max_new_tokens=100)
        self.is_finished = False
        self.retracted_stain = False

    def finished(self) -> bool:
        return self.is_finished


class Gate:
    """A scheduler that holds `reqs`, each with `text` text tokens known."""

    def __init__(self, *reqs: FakeReq, text: int = 0, done: bool = False):
        streams = {}
        for req in reqs:
            n_prompt = len(req.origin_input_ids)
            prompt = TalkerPrompt(req.rid, prompt_len=n_prompt, seed=0, greedy=True)
            streams[req.rid] = PromptStates().stream_of(prompt)
            streams[req.rid].text_ids = [0] * text
            streams[req.rid].text_done = done
        self.scheduler = FakeScheduler()
        self.talker = Talker(self.scheduler)
        self.talker.model = SimpleNamespace(streams=streams)
        self.talker.unfinished_text = set() if done else set(streams)
        self.talker.start = lambda: None
        self.scheduler.compose(self.talker)
        self.paused = self.scheduler.pausing.requests
        self.paused.update({req.rid: PausedRequest(req) for req in reqs})

    def must_pause(self, req: FakeReq) -> bool:
        return self.scheduler.pausing._must_pause(req)

    def lacks_input(self, req: FakeReq) -> bool:
        return self.talker.lacks_input(req)

    def awaits_input(self, *waiting: FakeReq) -> bool:
        self.scheduler.waiting_queue = list(waiting)
        return self.scheduler._awaits_input()


def test_a_request_is_blocked_exactly_while_its_next_frame_has_no_text():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    assert Gate(req, text=2).must_pause(req)
    assert not Gate(req, text=3).must_pause(req)
    assert not Gate(req, text=2, done=True).must_pause(req)


def test_a_request_that_is_being_aborted_is_not_paused():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    req.to_finish = object()
    assert not Gate(req).must_pause(req)


def test_a_request_of_sglangs_own_api_is_never_paused():
    req = FakeReq("HEALTH_CHECK", n_prompt=1, n_launched=0, n_output=1)
    assert not Gate().must_pause(req)
    assert not Gate().lacks_input(req)


def test_a_request_waits_in_the_queue_until_it_is_announced():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    assert Gate().lacks_input(req)
    assert not Gate(req).lacks_input(req)


def test_the_loop_sleeps_while_all_that_waits_lacks_input():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    announced = Gate(req)
    assert announced.awaits_input(req), "it is paused"
    announced.paused.clear()
    assert not announced.awaits_input(req)
    assert Gate().awaits_input(req) and not Gate().awaits_input()


def test_a_paused_request_that_ended_in_flight_is_not_kept():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    req.is_finished = True
    req.kv.kv_committed_len = 0  # its KV is gone
    gate = Gate(req)
    running = SimpleNamespace()
    assert gate.scheduler.pausing.resume(running) is running
    assert not gate.paused


def test_a_paused_request_resumes_only_after_its_step_in_flight():
    req = FakeReq("speak-a", n_prompt=9, n_launched=3, n_output=3)
    gate = Gate(req, text=9)
    running = SimpleNamespace()
    assert gate.scheduler.pausing.resume(running) is running
    assert list(gate.paused) == ["speak-a"]


def test_a_retracted_request_waits_for_the_text_of_its_newest_frame():
    """Its frames are prefilled: the newest one was blocked, or its text comes later."""
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=3)
    req.retracted_stain = True
    assert Gate(req, text=2).lacks_input(req)
    assert not Gate(req, text=3).lacks_input(req)
    assert not Gate(req, text=2, done=True).lacks_input(req)
    req.to_finish = object()
    assert not Gate(req, text=2).lacks_input(req)


def test_a_new_request_needs_no_text_but_that_of_its_prompt():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    assert not Gate(req).lacks_input(req)


@pytest.mark.parametrize(("mode", "n_frames"), [("EXTEND", 0), ("DECODE", 3)])
def test_frames_count_although_a_batch_still_names_the_chunk_it_was_built_with(mode, n_frames):
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    gate = Gate(req, text=9)
    gate.scheduler.enable_overlap = False
    gate.talker.model.row_lag = 0
    gate.talker.model.rows = SimpleNamespace(refresh=lambda stream: None)
    stream = gate.talker.model.streams["speak-a"]
    stream.row = req.kv.req_pool_idx = 1
    gate.talker.before_launch(
        SimpleNamespace(
            forward_mode=ForwardMode[mode],
            reqs=[req],
            seq_lens_cpu=torch.tensor([11]),
            chunked_req=req,
        )
    )
    assert stream.mid_prefill == (mode == "EXTEND")
    assert stream.n_frames == n_frames
