"""The vocoder stage over a decoder that needs no weights: a frame sounds as its first code."""

import asyncio
import queue
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_live.errors import BadInputError, CapacityError
from sglang_live.messages import (
    Pcm,
    SoundPlace,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderRequest,
)
from sglang_live.models.codecs import END_CODE
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.vocoder import stage as vocoder_stage
from sglang_live.stages.vocoder.batcher import Decoding, VocoderBatch

pytestmark = pytest.mark.usefixtures("must_not_hang")


class FirstCodeDecoder:
    n_quantizers, n_tail_frames, n_context_frames = 2, 0, None

    def new_stream(self) -> None:
        return None

    def check_codes(self, codes: torch.Tensor) -> None:
        if codes.numel() and int(codes.max()) >= 1000:
            raise BadInputError("codes must lie in the codebook")

    def decode(self, streams: list, codes: torch.Tensor) -> torch.Tensor:
        return codes[:, :, 0] / 32767.0


class Job:
    """One job as a stage sees it, with inputs and outputs in memory."""

    def __init__(self, job_id: str = "j"):
        self.job_id, self.opener = job_id, VocoderRequest(job_id, 60.0)
        self.sent: list = []
        self._inputs: asyncio.Queue = asyncio.Queue()

    def put(self, *frames: tuple[int, int], is_last: bool = False) -> None:
        if frames:
            codes = np.array(frames, "<i2").tobytes()
            self._inputs.put_nowait(VocoderFrames(self.job_id, codes))
        if is_last:
            self._inputs.put_nowait(VocoderEnd(self.job_id))

    @property
    def n_unread(self) -> int:
        return self._inputs.qsize()

    async def inputs(self):
        while True:
            yield await self._inputs.get()

    async def send(self, message, tensors=None) -> None:
        self.sent.append(message)

    def samples(self) -> list[int]:
        pcm = b"".join(message.pcm for message in self.sent if isinstance(message, Pcm))
        return np.frombuffer(pcm, "<i2").tolist()


class FakeCheckpoint:
    @staticmethod
    def from_pretrained(path, device, dtype) -> FirstCodeDecoder:
        return FirstCodeDecoder()


class FakeFamily:
    decoder = f"{__name__}:FakeCheckpoint"


FAMILY = FakeFamily()


@pytest.fixture
async def stage():
    spec = StageSpec(
        stage="vocoder",
        replica=0,
        model_path="",
        family=__name__,
        cache_dir="",
        address="",
        same_host=True,
        run_dir="",
        served_name="fake",
        engine_args={"max_streams": 2, "max_buffered_frames": 8},
    )
    running = vocoder_stage.VocoderStage(spec)
    await running.start()
    yield running
    running._stepping.cancel()
    running._worker.shutdown()


async def test_frames_become_their_sound_in_order_then_done(stage):
    job = Job()
    job.put(*((n, 0) for n in range(1, 8)))
    job.put((8, 0), (9, 0), is_last=True)
    await stage.run(job)
    assert job.samples() == list(range(1, 10))
    assert job.sent[-1] == VocoderDone("j")
    assert stage.load() == {"streams": 0.0}


async def test_rows_of_the_end_divide_a_job_into_utterances(stage, monkeypatch):
    ended = []
    end = stage._engine.end_utterance
    monkeypatch.setattr(stage._engine, "end_utterance", lambda job: ended.append(job) or end(job))
    job = Job()
    job.put((1, 0), (2, 0), (END_CODE, END_CODE), (3, 0))
    job.put((END_CODE, END_CODE), is_last=True)
    await stage.run(job)
    assert job.samples() == [1, 2, 3] and ended == ["j", "j"]


@pytest.mark.parametrize("n_rows", [1, 3, 7])
async def test_what_another_vocoder_has_sent_is_not_sent_again(stage, n_rows):
    end = (END_CODE, END_CODE)
    rows = [(1, 0), (2, 0), end, (3, 0), end, (4, 0), (5, 0), (6, 0)]
    for place, rest in [
        (SoundPlace(0, 1), [2, 3, 4, 5, 6]),
        (SoundPlace(0, 2), [3, 4, 5, 6]),
        (SoundPlace(1, 0), [3, 4, 5, 6]),
        (SoundPlace(2, 2), [6]),
        (SoundPlace(2, 3), []),
    ]:
        job = Job()
        job.opener = VocoderRequest("j", 60.0, sent=place)
        for at in range(0, len(rows), n_rows):
            job.put(*rows[at : at + n_rows])
        job.put(is_last=True)
        await stage.run(job)
        assert job.samples() == rest
        places = [message.place for message in job.sent if isinstance(message, Pcm)]
        assert places[-1:] == ([SoundPlace(2, 3)] if rest else [])


async def test_a_reply_without_frames_is_silent_and_done(stage):
    job = Job()
    job.put(is_last=True)
    await stage.run(job)
    assert job.sent == [VocoderDone("j")]


async def test_more_frames_than_fit_wait_for_room_and_none_is_lost(stage):
    job = Job()
    for n in range(100):
        job.put((n, 0), (n, 0))
    job.put(is_last=True)
    await stage.run(job)
    assert job.samples() == [n // 2 for n in range(200)]


async def test_frames_of_a_consumer_that_takes_nothing_are_not_read(stage):
    job, takes = Job(), asyncio.Event()
    send = job.send

    async def send_when_taken(message, tensors=None) -> None:
        await takes.wait()
        await send(message)

    job.send = send_when_taken
    for n in range(1, 1001):
        job.put((n % 1000, 0))
    job.put(is_last=True)
    running = asyncio.create_task(stage.run(job))
    left = -1
    while left != job.n_unread:  # until nothing more is read
        left = job.n_unread
        await asyncio.sleep(0.1)
    assert left > 900
    takes.set()
    await running
    assert job.samples() == [n % 1000 for n in range(1, 1001)]


async def test_a_full_vocoder_refuses_and_keeps_nothing_of_the_job(stage):
    open_jobs = [asyncio.create_task(stage.run(Job(name))) for name in ("a", "b")]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await stage.run(Job("c"))
    assert stage.load() == {"streams": 2.0}
    for task in open_jobs:
        task.cancel()
    await asyncio.gather(*open_jobs, return_exceptions=True)
    assert stage.load() == {"streams": 0.0}
    job = Job("d")
    job.put((1, 0), is_last=True)
    await stage.run(job)
    assert job.samples() == [1]


async def test_codes_outside_the_codebook_fail_their_job_alone(stage):
    bad, good = Job("bad"), Job("good")
    bad.put((5000, 0), is_last=True)
    good.put((7, 0))
    running = asyncio.create_task(stage.run(good))
    with pytest.raises(BadInputError, match="codebook"):
        await stage.run(bad)
    good.put((8, 0), is_last=True)
    await running
    assert good.samples() == [7, 8]


class FakeDevice:
    """A device on which decodes end when the test says so."""

    def __init__(self):
        self.launched: queue.Queue[threading.Event] = queue.Queue()

    def launch(self, batch: VocoderBatch) -> Decoding:
        decoding = launch(batch)
        if batch.codes is None:
            return decoding
        ended = threading.Event()
        self.launched.put(ended)
        return replace(decoding, arrived=SimpleNamespace(synchronize=lambda: ended.wait(10.0)))


launch = VocoderBatch.launch


async def test_a_decode_is_launched_while_one_of_another_shape_is_computed(stage, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(VocoderBatch, "launch", lambda batch: device.launch(batch))

    async def launched() -> threading.Event:
        return await asyncio.to_thread(device.launched.get, timeout=10.0)

    first, second = Job("first"), Job("second")
    first.put((1, 0), (2, 0))
    running = asyncio.create_task(stage.run(first))
    (await launched()).set()
    first.put((3, 0), (4, 0))  # a later chunk of its stream, and so another shape than a first one
    of_first = await launched()
    second.put((5, 0), (6, 0), is_last=True)
    other = asyncio.create_task(stage.run(second))
    of_second = await launched()
    assert not of_first.is_set()
    of_second.set()
    await other
    assert second.samples() == [5, 6] and first.samples() == [1, 2]
    of_first.set()
    first.put(is_last=True)
    await running
    assert first.samples() == [1, 2, 3, 4]
