"""A talker that misses its end is ended by a bound that follows from its text."""

import asyncio
from types import SimpleNamespace

import pytest

from sglang_live.messages import CodecFrames, TalkerDone, TalkerInput, TalkerRequest
from sglang_live.stages.talker.response import (
    FRAMES_PER_TOKEN,
    MAX_FRAMES,
    SPARE_FRAMES,
    SpeechBound,
)
from sglang_live.stages.talker.stage import TalkerStage


@pytest.mark.parametrize("n_ids", [1, 20, 10_000])
def test_the_bound_follows_the_text_once_it_is_complete(n_ids):
    bound = SpeechBound(MAX_FRAMES, n_ids=n_ids)
    assert bound.max_frames == MAX_FRAMES
    bound.is_complete = True
    assert bound.max_frames == min(MAX_FRAMES, SPARE_FRAMES + FRAMES_PER_TOKEN * n_ids)


class FakeHost:
    """Speaks one frame a chunk, and after `ends_at` of them says that it has come to its end."""

    context_tokens = 32_768

    def __init__(self, stage: TalkerStage, ends_at: int):
        self.stage, self.ends_at, self.left_early = stage, ends_at, False

    async def stream(self, rid: str, **_request):
        ids, finished = [], False
        try:
            while not finished:
                ids.append(7)
                finished = len(ids) > self.ends_at
                if not finished:
                    self.stage._frames[rid].put(len(ids) - 1, [7])
                reason = {"type": "stop"} if finished else None
                yield {"output_ids": list(ids), "meta_info": {"finish_reason": reason}}
                await asyncio.sleep(0)
        finally:
            self.left_early = not finished


class FakeJob:
    job_id = "job"
    frames = ()

    def __init__(self, n_ids: int):
        self.opener = TalkerRequest("job", "s", [], [], "anna", 5, None, 0, 60.0)
        self.sent: list = []
        self.n_ids = n_ids

    async def inputs(self):
        yield TalkerInput("job", [5] * (self.n_ids - 1), done=False)
        yield TalkerInput("job", [], done=True)

    async def send(self, message) -> None:
        self.sent.append(message)


def talker(ends_at: int) -> TalkerStage:
    stage = object.__new__(TalkerStage)
    stage._frames, stage._heard, stage._bounds, stage._n_dropped = {}, None, False, 0
    stage._stream_events = SimpleNamespace(add=lambda *a: None, remove=lambda *a: None)
    stage._feed = SimpleNamespace(send=lambda message: None)
    stage._segments = SimpleNamespace(
        keep_only=lambda *a: None, missing=lambda *a: [], close=lambda *a: None
    )
    stage._announce = lambda request, session, first_id: ("speak-job", [first_id, 2])
    stage.model = SimpleNamespace(text_end_id=9, reads=None)
    stage.host = FakeHost(stage, ends_at)
    return stage


async def spoken(stage: TalkerStage, n_ids: int) -> tuple[TalkerDone, int]:
    job = FakeJob(n_ids)
    await stage.run(job)
    return job.sent[-1], sum(m.n_frames for m in job.sent if isinstance(m, CodecFrames))


async def test_a_talker_without_an_end_is_cut_and_leaves_the_engine():
    stage = talker(ends_at=10**6)
    end, n_frames = await spoken(stage, n_ids=10)
    # The end token counts as text, and the frames of the round in flight are sent.
    most = SPARE_FRAMES + FRAMES_PER_TOKEN * 11
    assert most <= n_frames == end.n_frames <= most + 2
    assert end.finish == "length"
    assert stage.host.left_early
    assert stage._n_dropped == 1


async def test_a_talker_that_comes_to_its_end_is_not():
    stage = talker(ends_at=40)
    end, n_frames = await spoken(stage, n_ids=10)
    assert (end.finish, end.n_frames, n_frames) == ("stop", 40, 40)
    assert not stage.host.left_early
    assert stage._n_dropped == 0
