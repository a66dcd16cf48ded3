"""Blocked requests of the talker, without an engine: fakes replace the rest of the scheduler."""

from types import SimpleNamespace

from sglang_live.bridge.scheduler.paused import PausedRequest
from sglang_live.bridge.scheduler.talker import TalkerScheduler
from sglang_live.bridge.scheduler.talker_input import PromptStates
from sglang_live.engine_channel.messages import SPEAK_PREFIX, TalkerPrompt


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


def gate(*reqs: FakeReq, text: int = 0, done: bool = False) -> TalkerScheduler:
    """A scheduler that holds `reqs`, each with `text` text tokens known."""
    scheduler = object.__new__(TalkerScheduler)
    streams = {}
    for req in reqs:
        prompt = TalkerPrompt(req.rid, prompt_len=len(req.origin_input_ids), seed=0, greedy=True)
        streams[req.rid] = PromptStates().stream_of(prompt)
        streams[req.rid].text_ids = [0] * text
        streams[req.rid].text_done = done
    scheduler.model = SimpleNamespace(streams=streams)
    scheduler.unfinished_text = set() if done else set(streams)
    scheduler.rounds = None
    scheduler.paused = {req.rid: PausedRequest(req) for req in reqs}
    return scheduler


def test_a_request_is_blocked_exactly_while_its_next_frame_has_no_text():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    assert gate(req, text=2)._must_pause(req)
    assert not gate(req, text=3)._must_pause(req)
    assert not gate(req, text=2, done=True)._must_pause(req)


def test_a_request_that_is_being_aborted_is_not_paused():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    req.to_finish = object()
    assert not gate(req)._must_pause(req)


def test_a_request_of_sglangs_own_api_is_never_paused():
    req = FakeReq("HEALTH_CHECK", n_prompt=1, n_launched=0, n_output=1)
    assert not gate()._must_pause(req)
    assert not gate()._is_unannounced(req)


def test_a_request_waits_in_the_queue_until_it_is_announced():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    assert gate()._is_unannounced(req)
    assert not gate(req)._is_unannounced(req)


def test_the_loop_sleeps_while_all_that_waits_lacks_input():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    unannounced, announced, idle = gate(), gate(req), gate()
    unannounced.waiting_queue = announced.waiting_queue = [req]
    announced.paused, idle.waiting_queue = {}, []
    assert unannounced._awaits_input()
    assert not announced._awaits_input() and not idle._awaits_input()
    announced.paused = {req.rid: PausedRequest(req)}
    assert announced._awaits_input()


def test_a_paused_request_that_ended_in_flight_is_not_kept():
    req = FakeReq("speak-a", n_prompt=9, n_launched=2, n_output=3)
    req.is_finished = True
    req.kv.kv_committed_len = 0  # its KV is gone
    scheduler = gate(req)
    running = SimpleNamespace()
    assert scheduler._resume(running) is running
    assert not scheduler.paused


def test_a_paused_request_resumes_only_after_its_step_in_flight():
    req = FakeReq("speak-a", n_prompt=9, n_launched=3, n_output=3)
    scheduler = gate(req, text=9)
    running = SimpleNamespace()
    assert scheduler._resume(running) is running
    assert list(scheduler.paused) == ["speak-a"]


def test_a_retracted_request_waits_for_the_text_of_its_newest_frame():
    """Its frames are prefilled: the newest one was blocked, or its text comes later."""
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=3)
    req.retracted_stain = True
    assert gate(req, text=2)._lacks_input(req)
    assert not gate(req, text=3)._lacks_input(req)
    assert not gate(req, text=2, done=True)._lacks_input(req)
    req.to_finish = object()
    assert not gate(req, text=2)._lacks_input(req)


def test_a_new_request_needs_no_text_but_that_of_its_prompt():
    req = FakeReq(f"{SPEAK_PREFIX}a", n_prompt=9, n_launched=0, n_output=0)
    assert not gate(req)._lacks_input(req)
