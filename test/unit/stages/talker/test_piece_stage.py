"""A talker stage that speaks pieces, over an engine whose ids are given."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from sglang_live.clock import MonotonicClock
from sglang_live.messages import (
    CodecFrames,
    Frames,
    Heard,
    TalkerDone,
    TalkerForget,
    TalkerInput,
    TalkerPrompt,
    TalkerRequest,
    TalkerText,
)
from sglang_live.models.codecs import END_CODE
from sglang_live.models.piece_talker import FrameTalker, StockTalker, WrongCodeError
from sglang_live.models.speech_lm.mixing import BEGIN, MixedVoice, Ratio
from sglang_live.models.speech_lm.mixing import TEXT as TEXT_CODE
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.talker.piece_engine import OwnPieces, PieceEngine, StockPieces
from sglang_live.stages.talker.piece_stage import PieceStage

pytestmark = pytest.mark.usefixtures("must_not_hang")

STOP = 99


class PairReader:
    """Two ids are a frame; the first is less than 10, the second not."""

    def __init__(self):
        self.ids: list[int] = []

    def add(self, ids: list[int]) -> list[list[int]]:
        for token in ids:
            if (token >= 10) != len(self.ids) % 2:
                raise WrongCodeError(f"id {token}")
            self.ids.append(token)
        n = len(self.ids) // 2
        frames, self.ids = [self.ids[2 * i : 2 * i + 2] for i in range(n)], self.ids[2 * n :]
        return frames


class Model(StockTalker):
    voices, style = ("anna",), SpeechStyle()
    codes_per_frame = steps_per_frame = 2
    frame_s, chunk_frames = 0.1, 4
    stop_ids, sampling = (STOP,), {"temperature": 0.6}

    def engine_args(self, cache_dir): ...

    def prompt(self, voice, text):
        return [len(word) for word in text.split()]

    def frames(self):
        return PairReader()


class FakeHost:
    """Writes the ids that are given for each request, some at a time."""

    context_tokens = 100

    def __init__(self, *written: list[int], finish: str = "stop"):
        self.written, self.finish = list(written), finish
        self.requests: list[dict] = []
        self.n_open = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def stream(self, rid: str, **request):
        self.requests.append(request | {"rid": rid})
        ids = self.written.pop(0)
        self.n_open += 1
        try:
            for n in range(1, len(ids) + 1):
                await self.gate.wait()
                reason = {"type": self.finish} if n == len(ids) else None
                yield {"output_ids": ids[:n], "meta_info": {"finish_reason": reason}}
        finally:
            self.n_open -= 1


class FakeJob:
    job_id = "job"

    def __init__(self, *messages, temperature: float | None = None):
        self.opener = TalkerRequest("job", "s", [], [], "anna", None, temperature, 5, 60.0)
        self.sent: list = []
        self._unread: asyncio.Queue = asyncio.Queue()
        for message in messages:
            self._unread.put_nowait(message)

    async def inputs(self):
        while True:
            yield await self._unread.get()

    async def send(self, message) -> None:
        self.sent.append(message)

    async def put(self, message) -> None:
        await self._unread.put(message)

    def frames(self) -> list[list[int]]:
        codes = b"".join(m.codes for m in self.sent if isinstance(m, CodecFrames))
        return np.frombuffer(codes, "<i2").reshape(-1, 2).tolist()


def piece_stage(host: FakeHost, pieces: PieceEngine | None = None) -> PieceStage:
    stage = object.__new__(PieceStage)
    stage.model, stage.host, stage._clock = Model(), host, MonotonicClock()
    stage._pieces = pieces or StockPieces(host, stage.model)
    stage.passed = []
    stage._heard = SimpleNamespace(
        put=lambda rid, progress: stage.passed.append((rid, progress.heard_s)),
        forget=lambda rid: None,
    )
    stage._stream_events = SimpleNamespace(add=lambda *a: None, remove=lambda *a: None)
    stage._n_jobs = 0
    names = ("pieces", "frames", "speech_truncated", "unspeakable", "diverged")
    stage._counts = dict.fromkeys(names, 0.0)
    return stage


TEXT = TalkerInput("job", [], True, "Good morning to you. Good night.", 8)
END = [END_CODE, END_CODE]


async def test_each_piece_is_a_request_and_an_utterance():
    host = FakeHost([1, 11, 2, 12, STOP], [3, 13, STOP])
    stage, job = piece_stage(host), FakeJob(TEXT)
    await stage.run(job)
    assert job.frames() == [[1, 11], [2, 12], END, [3, 13], END]
    assert job.sent[-1] == TalkerDone("job", finish="stop", n_frames=3, n_read=6)
    assert [request["input_ids"] for request in host.requests] == [[4, 7, 2, 4], [4, 6]]
    assert len({request["rid"] for request in host.requests}) == 2
    first, second = (request["sampling_params"] for request in host.requests)
    assert first["stop_token_ids"] == [STOP] and first["temperature"] == 0.6
    assert (first["sampling_seed"], second["sampling_seed"]) == (5, 6)
    marks = [mark for m in job.sent if isinstance(m, CodecFrames) for mark in m.spoken]
    assert marks[-1] == (8, pytest.approx(0.3)) and (5, pytest.approx(0.2)) in marks
    assert stage._counts["frames"] == 3 and stage._counts["pieces"] == 2


@pytest.mark.parametrize("n_known", range(6))
async def test_a_response_goes_on_behind_what_another_replica_has_made(n_known):
    written = [1, 11, 2, 12, STOP], [3, 13, STOP]
    whole = FakeJob(TEXT)
    await piece_stage(FakeHost(*written)).run(whole)
    rows = whole.frames()
    n_ended = rows[:n_known].count(END)
    host, job = FakeHost(*written[n_ended:]), FakeJob(TEXT)
    stage = piece_stage(host)
    job.opener = msgspec.structs.replace(
        job.opener,
        codes=np.array(rows[:n_known], "<i2").tobytes(),
        n_frames=n_known - n_ended,
    )
    await stage.run(job)
    assert rows[:n_known] + job.frames() == rows
    assert job.sent[-1] == whole.sent[-1]
    seeds = [request["sampling_params"]["sampling_seed"] for request in host.requests]
    assert seeds == [5, 6][n_ended:]
    assert stage._counts["diverged"] == 0


async def test_a_piece_that_is_made_otherwise_than_before_is_counted():
    host, job = FakeHost([1, 11, 2, 12, STOP], [STOP]), FakeJob(TEXT)
    stage = piece_stage(host)
    known = np.array([[4, 14]], "<i2").tobytes()
    job.opener = msgspec.structs.replace(job.opener, codes=known, n_frames=1)
    await stage.run(job)
    assert job.frames() == [[2, 12], END, END]
    assert stage._counts["diverged"] == 1


async def test_a_temperature_of_the_request_goes_before_the_models():
    host = FakeHost([1, 11, STOP], [STOP])
    await piece_stage(host).run(FakeJob(TEXT, temperature=0.0))
    assert host.requests[0]["sampling_params"]["temperature"] == 0.0


async def test_a_code_in_a_wrong_place_fails_the_response_and_is_counted():
    host = FakeHost([1, 11, 12, 2, STOP])
    stage, job = piece_stage(host), FakeJob(TEXT)
    with pytest.raises(WrongCodeError, match="id 12"):
        await stage.run(job)
    assert stage._pieces.counts["codes_refused"] == 1
    assert job.frames() == [[1, 11]] and host.n_open == 0


async def test_a_piece_that_misses_its_end_is_bounded_and_the_next_one_is_spoken():
    host = FakeHost([1, 11, 2, 12], [3, 13], finish="length")
    stage, job = piece_stage(host), FakeJob(TEXT)
    await stage.run(job)
    assert job.sent[-1] == TalkerDone("job", finish="length", n_frames=3, n_read=6)
    assert stage._counts["speech_truncated"] == 2
    # The context is full before the bound is reached.
    assert host.requests[0]["sampling_params"]["max_new_tokens"] == 100 - 4 - 1


async def test_a_cancelled_job_closes_its_request():
    host = FakeHost([1, 11, STOP])
    host.gate.clear()
    stage, job = piece_stage(host), FakeJob(TEXT)
    running = asyncio.create_task(stage.run(job))
    while not host.n_open:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert host.n_open == 0 and stage._n_jobs == 0 and job.sent == []


async def test_progress_reaches_a_request_when_the_engine_knows_it():
    host = FakeHost([1, 11, STOP], [2, 12, STOP])
    stage, job = piece_stage(host), FakeJob(Heard("job", 0.05, False), TEXT)
    await stage.run(job)
    first, second = (request["rid"] for request in host.requests)
    # The first piece has sounded for 0.1 s before the second begins.
    assert stage.passed == [(first, pytest.approx(0.05)), (second, pytest.approx(-0.05))]


async def test_a_text_of_which_nothing_is_said_needs_no_engine():
    job = FakeJob(TalkerInput("job", [], True, "😀 😀\n", 4))
    await piece_stage(FakeHost()).run(job)
    assert job.sent == [TalkerDone("job", finish="stop", n_frames=0)]


class OwnModel(FrameTalker):
    """A class of its own draws frames of two codes; STOP comes without one."""

    voices, style = ("anna",), SpeechStyle()
    codes_per_frame, frame_s, chunk_frames = 2, 0.1, 4
    end_id, temperature, repetition_penalty = STOP, 0.9, 1.1

    def engine_args(self, cache_dir, n_rows): ...

    def prompt(self, voice, text):
        return [len(word) for word in text.split()]

    def least_frames(self, text):
        return 2 * len(text.split())


def test_steps_of_which_nothing_is_sound_yet_are_those_of_a_chunk_and_a_lag():
    model = OwnModel()
    assert (Model().chunk_steps, model.chunk_steps) == (2 * 4, 4)
    model.ahead_frames, model.lag_steps = 3, 7
    assert model.chunk_steps == 4 + 3 + 7


class ReportingHost(FakeHost):
    """Its scheduler reports the frame of every id but STOP, before or behind the id."""

    def __init__(self, *written: list[int], late: bool, **kwargs):
        super().__init__(*written, **kwargs)
        self.late = late
        self.fed: list = []
        self.pieces = OwnPieces(self, OwnModel(), self.fed.append)

    async def stream(self, rid: str, **request):
        async for chunk in super().stream(rid, **request):
            *_, last = ids = chunk["output_ids"]
            loop = asyncio.get_running_loop()
            report = Frames([rid, "other"], [len(ids) - 1, 7], [[last, 10 + last], [0, 0]])
            if last == STOP:
                pass
            elif self.late:
                loop.call_soon(self.pieces.take, report)
            else:
                self.pieces.take(report)
            yield chunk


@pytest.mark.parametrize("late", [False, True])
async def test_a_class_of_its_own_is_told_each_piece_and_reports_its_frames(late):
    host = ReportingHost([1, 2, STOP], [3, STOP], late=late)
    stage, job = piece_stage(host, host.pieces), FakeJob(TEXT)
    await stage.run(job)
    assert job.frames() == [[1, 11], [2, 12], END, [3, 13], END]
    assert job.sent[-1] == TalkerDone("job", finish="stop", n_frames=3, n_read=6)
    rids = [request["rid"] for request in host.requests]
    told = [message for message in host.fed if isinstance(message, TalkerPrompt)]
    assert [(m.rid, m.prompt_len, m.seed, m.greedy) for m in told] == [
        (rids[0], 4, 5, False),
        (rids[1], 2, 6, False),
    ]
    assert {(m.temperature, m.penalty) for m in told} == {(0.9, 1.1)}
    assert [m.least_frames for m in told] == [8, 4]
    assert [type(m) for m in host.fed] == [TalkerPrompt, TalkerText, TalkerForget] * 2
    assert all(m.done for m in host.fed if isinstance(m, TalkerText)), "no step waits for text"
    assert {request["sampling_params"]["temperature"] for request in host.requests} == {0.0}


async def test_a_class_of_its_own_that_misses_its_end_is_bounded():
    host = ReportingHost([1, 2], [3], late=True, finish="length")
    stage, job = piece_stage(host, host.pieces), FakeJob(TEXT, temperature=0.0)
    await stage.run(job)
    assert job.frames() == [[1, 11], [2, 12], END, [3, 13], END]
    assert job.sent[-1].finish == "length"
    assert host.fed[0].greedy


async def test_a_piece_of_a_class_of_its_own_that_is_cancelled_is_forgotten():
    host = ReportingHost([1, STOP], late=False)
    host.gate.clear()
    running = asyncio.create_task(piece_stage(host, host.pieces).run(job := FakeJob(TEXT)))
    while not host.n_open:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert isinstance(host.fed[-1], TalkerForget) and job.sent == [] and host.n_open == 0
    host.pieces.take(Frames([host.fed[-1].rid], [0], [[1, 2]]))  # of a step in flight


# --- text between frames ---

MIXED = MixedVoice(
    ratio=Ratio(n_text=2, n_codes=3), head=[70], words=[], codes=[], task_id=80, again_id=81
)


class MixedModel(OwnModel):
    def mixed_voice(self, voice):
        return MIXED

    def words(self, text):
        return [len(word) for word in text.split()]


def mixing_stage(*written: list[int], **kwargs) -> tuple[PieceStage, ReportingHost]:
    host = ReportingHost(*written, late=False, **kwargs)
    stage = piece_stage(host, host.pieces)
    stage.model = MixedModel()
    stage._counts["silence_dropped"] = 0.0
    return stage, host


def part(text: str, n_tokens: int, done: bool = False) -> TalkerInput:
    return TalkerInput("job", [], done, text, n_tokens)


PASSAGE = [2, BEGIN, TEXT_CODE, 3, STOP]


async def test_text_that_grows_is_passed_between_the_frames_that_speak_it():
    stage, host = mixing_stage([1, STOP], PASSAGE)
    job = FakeJob(part("Good morning to you. The", 6))
    running = asyncio.create_task(stage.run(job))
    while job.frames() != [[1, 11], END]:
        await asyncio.sleep(0)
    host.gate.clear()
    await job.put(part("re is some news for you. It ", 12))
    while not host.n_open:
        await asyncio.sleep(0)
    _, prompt = [message for message in host.fed if isinstance(message, TalkerPrompt)]
    assert (prompt.block, prompt.least_frames, prompt.prompt_len) == (0, 0, 3)
    assert host.requests[-1]["input_ids"] == [70, 5, 2]
    rid = prompt.rid
    assert host.fed[-1] == TalkerText(rid, [4, -1 - 4, 3, -1 - 4], done=False)
    await job.put(part("is. So.", 16, done=True))
    while not host.fed[-1].done:
        await asyncio.sleep(0)
    host.gate.set()
    await running
    assert job.frames() == [[1, 11], END, [2, 12], [3, 13], END]
    assert host.fed[-3:] == [
        TalkerText(rid, [2, -1 - 3], done=False),
        TalkerText(rid, [81, 3, -1 - 80], done=True),
        TalkerForget(rid),
    ]
    assert job.sent[-1] == TalkerDone("job", finish="stop", n_frames=3, n_read=7)
    marks = [mark for m in job.sent if isinstance(m, CodecFrames) for mark in m.spoken]
    assert marks[-1] == (16, pytest.approx(0.3))
    assert stage._counts["silence_dropped"] == 0.0


async def test_a_text_that_is_given_whole_is_not_mixed():
    stage, host = mixing_stage([1, STOP], [2, STOP])
    job = FakeJob(part("Good morning to you. There is some news for you.", 10, done=True))
    job.opener = msgspec.structs.replace(job.opener, text_grows=False)
    await stage.run(job)
    told = [message for message in host.fed if isinstance(message, TalkerPrompt)]
    assert [message.block for message in told] == [-1, -1]
    assert all(m.done and not m.ids for m in host.fed if isinstance(m, TalkerText))


@pytest.mark.parametrize("n_known", range(6))
async def test_a_mixed_response_goes_on_behind_what_another_replica_has_made(n_known):
    stage, _ = mixing_stage(*[[1, STOP], PASSAGE][n_known > 1 :])
    job = FakeJob(part("Good morning to you. There is some news for you.", 10, done=True))
    rows = [[1, 11], END, [2, 12], [3, 13], END]
    n_ended = rows[:n_known].count(END)
    job.opener = msgspec.structs.replace(
        job.opener,
        codes=np.array(rows[:n_known], "<i2").tobytes(),
        n_frames=n_known - n_ended,
    )
    await stage.run(job)
    assert rows[:n_known] + job.frames() == rows
    assert job.sent[-1].n_frames == 3 and stage._counts["diverged"] == 0


async def test_a_passage_that_misses_its_end_is_cut_at_the_bound_of_its_text():
    stage, host = mixing_stage([1, STOP], [2] * 400)
    job = FakeJob(part("Good morning to you. There is some news for you.", 10, done=True))
    await stage.run(job)
    n_most = round((4.0 + 0.375 * len("There is some news for you.")) / 0.1)
    assert len(job.frames()) == 1 + 1 + n_most + 1
    assert job.sent[-1].finish == "length" and host.n_open == 0
