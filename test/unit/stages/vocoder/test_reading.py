"""A vocoder that reads text: its sound, what of the text is in it, and its order of work."""

import asyncio
import threading

import numpy as np
import pytest

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.errors import CapacityError, StageFailedError
from sglang_live.messages import (
    Pcm,
    SoundPlace,
    VocoderDone,
    VocoderEnd,
    VocoderRequest,
    VocoderText,
)
from sglang_live.models.speech import Speech, SpokenWord
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.vocoder import reading
from sglang_live.stages.vocoder.reading import ReadingStage

# Of the fake voice: each character has the same duration.
SAMPLES_PER_CHARACTER = 480


class FakeVoice:
    """Sound is one sample value per piece; `gate` holds the worker back."""

    sample_rate_hz, voices = OUTPUT_RATE_HZ, ("anna", "ben")
    times_words = True
    style = SpeechStyle()

    def __init__(self):
        self.said: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def synthesise(self, text: str, voice: str) -> Speech:
        self.gate.wait(10)
        if text == "Break.":
            raise RuntimeError("no sound")
        if text == "Slow.":
            return slow()
        self.said.append((text, voice))
        pcm = np.full(len(text) * SAMPLES_PER_CHARACTER, len(self.said), np.int16)
        ends = [i for i in range(1, len(text) + 1) if i == len(text) or text[i] == " "]
        per_s = SAMPLES_PER_CHARACTER / OUTPUT_RATE_HZ
        return Speech(pcm=pcm, words=tuple(SpokenWord(end, end * per_s) for end in ends))


def slow() -> Speech:
    """A word between half a second and a second, in two seconds of near silence."""
    pcm = np.ones(2 * OUTPUT_RATE_HZ, np.int16)
    pcm[OUTPUT_RATE_HZ // 2 : OUTPUT_RATE_HZ] = 1000
    return Speech(pcm=pcm, words=(SpokenWord(5, 1.0),))


VOICE = FakeVoice()


def load_voice(path) -> FakeVoice:
    return VOICE


class FakeFamily:
    talker, voice = None, f"{__name__}:load_voice"


FAMILY = FakeFamily()


class FakeJob:
    def __init__(self, job_id: str, voice: str = "anna", flex: bool = False):
        self.job_id, self.opener = job_id, VocoderRequest(job_id, 60.0, voice=voice, flex=flex)
        self.given: asyncio.Queue = asyncio.Queue()
        self.sent: list = []

    async def inputs(self):
        while True:
            yield await self.given.get()

    def text(self, text: str, n_tokens: int) -> None:
        self.given.put_nowait(VocoderText(self.job_id, text, n_tokens))

    def end(self) -> None:
        self.given.put_nowait(VocoderEnd(self.job_id))

    async def send(self, message) -> None:
        self.sent.append(message)

    @property
    def samples(self) -> list[int]:
        pcm = b"".join(m.pcm for m in self.sent if isinstance(m, Pcm))
        return np.frombuffer(pcm, "<i2").tolist()

    @property
    def marks(self) -> list[tuple[int, float]]:
        return [mark for m in self.sent if isinstance(m, Pcm) for mark in m.spoken]


@pytest.fixture
async def stage():
    VOICE.said.clear()
    VOICE.gate.set()
    running = ReadingStage(
        StageSpec(
            stage="vocoder",
            replica=0,
            model_path="",
            family=__name__,
            cache_dir="",
            address="",
            same_host=True,
            run_dir="",
            served_name="fake",
            engine_args={"max_streams": 2},
        )
    )
    await running.start()
    VOICE.said.clear()
    yield running
    VOICE.gate.set()
    running._working.cancel()
    running._worker.shutdown()


async def test_text_becomes_sound_in_order_then_done(stage):
    job = FakeJob("a", voice="ben")
    running = asyncio.create_task(stage.run(job))
    for n, word in enumerate(["Hello ", "there, ", "my ", "friend. ", "How ", "are ", "you?"], 1):
        job.text(word, n)
    job.end()
    await running
    assert isinstance(job.sent[-1], VocoderDone)
    said = [text for text, _ in VOICE.said]
    assert " ".join(said) == "Hello there, my friend. How are you?"
    assert {voice for _, voice in VOICE.said} == {"ben"}
    assert len(job.samples) == SAMPLES_PER_CHARACTER * sum(map(len, said))


async def test_each_word_is_marked_with_the_tokens_up_to_its_end(stage):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    for n, word in enumerate(["One", " two", " three", "."], 1):
        job.text(word, n)
    job.end()
    await running
    per_s = SAMPLES_PER_CHARACTER / OUTPUT_RATE_HZ
    assert [n for n, _ in job.marks] == [1, 2, 4]
    assert [end_s for _, end_s in job.marks] == pytest.approx([n * per_s for n in (3, 7, 14)])
    # A mark comes with the sound that it belongs to, or before.
    sent_s = 0.0
    for message in (m for m in job.sent if isinstance(m, Pcm)):
        sent_s += len(message.pcm) / 2 / OUTPUT_RATE_HZ
        assert all(end_s <= sent_s + 1e-6 for _, end_s in message.spoken)


async def test_words_that_are_not_spoken_as_written_keep_their_place(stage):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    for n, word in enumerate(["It", " costs", " $3", ".50", " now", "."], 1):
        job.text(word, n)
    job.end()
    await running
    tokens = [n for n, _ in job.marks]
    assert tokens == sorted(tokens) and tokens[0] == 1 and tokens[-1] == 6


async def test_the_first_piece_of_a_response_goes_before_later_ones(stage):
    VOICE.gate.clear()
    first, second = FakeJob("a"), FakeJob("b")
    running = [asyncio.create_task(stage.run(first))]
    first.text("The first one begins here. " + "It goes on and on without an end at all. " * 4, 50)
    first.end()
    await asyncio.sleep(0.05)  # its first piece is at the worker
    running.append(asyncio.create_task(stage.run(second)))
    second.text("The second one begins here. ", 5)
    second.end()
    await asyncio.sleep(0.05)
    VOICE.gate.set()
    await asyncio.gather(*running)
    said = [text for text, _ in VOICE.said]
    assert said.index("The second one begins here.") <= 1


async def test_flex_waits_behind_what_is_heard_for_a_time(stage):
    VOICE.gate.clear()
    heard, flex = FakeJob("a"), FakeJob("b", flex=True)
    running = [asyncio.create_task(stage.run(heard))]
    # More than 10 s of speech: its last pieces are due later than the one that waits.
    heard.text("It goes on and on without an end, and nothing is new. " * 20, 200)
    heard.end()
    await asyncio.sleep(0.05)  # its first piece is at the worker
    running.append(asyncio.create_task(stage.run(flex)))
    flex.text("This one may wait. ", 5)
    flex.end()
    await asyncio.sleep(0.05)
    VOICE.gate.set()
    await asyncio.gather(*running)
    said = [text for text, _ in VOICE.said]
    at = said.index("This one may wait.")
    seconds = sum(map(len, said[:at])) * SAMPLES_PER_CHARACTER / OUTPUT_RATE_HZ
    assert 10 <= seconds < 16 and at < len(said) - 1


async def test_a_voice_that_fails_fails_its_response_alone(stage):
    broken, whole = FakeJob("a"), FakeJob("b")
    running = [asyncio.create_task(stage.run(job)) for job in (broken, whole)]
    broken.text("Break.", 2)
    broken.end()
    whole.text("All is well.", 4)
    whole.end()
    with pytest.raises(StageFailedError, match="the voice failed: no sound"):
        await running[0]
    await running[1]
    assert whole.samples and stage.load()["failed"] == 1


async def test_more_responses_than_allowed_are_refused(stage):
    jobs = [FakeJob(name) for name in "abc"]
    running = [asyncio.create_task(stage.run(job)) for job in jobs[:2]]
    await asyncio.sleep(0)
    with pytest.raises(CapacityError):
        await stage.run(jobs[2])
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert stage.load()["streams"] == 0


async def test_a_cancelled_response_is_not_synthesised(stage):
    VOICE.gate.clear()
    first, gone = FakeJob("a"), FakeJob("b")
    running = asyncio.create_task(stage.run(first))
    first.text("Hello there. ", 2)
    first.end()
    await asyncio.sleep(0.05)
    cancelled = asyncio.create_task(stage.run(gone))
    gone.text("Not said. ", 3)
    gone.end()
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    VOICE.gate.set()
    await running
    assert [text for text, _ in VOICE.said] == ["Hello there."]


async def test_silence_around_a_piece_is_cut_and_words_keep_their_time(stage):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    job.text("Slow.", 3)
    job.end()
    await running
    lead, word, tail = (round(s * OUTPUT_RATE_HZ) for s in (0.03, 0.5, 0.2))
    assert len(job.samples) == lead + word + tail
    assert job.samples[lead - 1 : lead + 1] == [1, 1000]
    assert job.marks == [(3, pytest.approx((lead + word) / OUTPUT_RATE_HZ))]


class FakeTime:
    """Stands still but for what a test adds."""

    def __init__(self):
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(reading, "time", fake)
    return fake


async def write(job: FakeJob, text: str, clock: FakeTime, word_s: float = 0.0) -> None:
    """Give a text word by word."""
    for n, word in enumerate(text.split(), 1):
        job.text(word + " ", n)
        while not job.given.empty():
            await asyncio.sleep(0)
        clock.now_s += word_s


async def until_sound(job: FakeJob) -> None:
    async with asyncio.timeout(20):
        while not job.samples:
            await asyncio.sleep(0.01)


def decided(stage: ReadingStage) -> float:
    """The number of responses whose first words were read before their piece had come."""
    return stage.load()["begun_early"] + stage.load()["not_begun"]


async def until_decided(stage: ReadingStage, n: float) -> None:
    async with asyncio.timeout(20):
        while decided(stage) < n:
            await asyncio.sleep(0.01)


NEAR = round(0.012 * OUTPUT_RATE_HZ)  # two sounds are moved against each other
LONG = "The main reason for that is that nothing else will ever be enough for all of us."


async def test_the_first_words_sound_before_their_piece_has_come(stage, clock):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    await write(job, "The main reason for that is", clock, word_s=0.01)
    await until_sound(job)
    assert [text for text, _ in VOICE.said] == ["The main reason for that"]
    # Without the last word, which the voice shaped as an end.
    assert len(job.samples) == SAMPLES_PER_CHARACTER * len("The main reason for")
    job.text("clear now. ", 8)
    job.end()
    await running
    whole = "The main reason for that is clear now."
    assert [text for text, _ in VOICE.said] == ["The main reason for that", whole]
    assert abs(len(job.samples) - SAMPLES_PER_CHARACTER * len(whole)) <= NEAR
    tokens, ends_s = zip(*job.marks, strict=True)
    assert tokens[:6] == (1, 2, 3, 4, 5, 6) and tokens[-1] == 8 and list(ends_s) == sorted(ends_s)
    assert ends_s[-1] == pytest.approx(len(job.samples) / OUTPUT_RATE_HZ)
    assert stage.load()["begun_early"] == 1


async def test_text_that_comes_slower_than_speech_does_not_begin_early(stage, clock):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    # The first words last 0.38 s, and the rest has come after 0.4 s.
    await write(job, "The main reason for that is", clock, word_s=0.08)
    await until_decided(stage, 1)
    job.text("that nothing else will ever be enough for all of us.", 7)
    job.end()
    await running
    assert stage.load()["begun_early"] == 0
    pieces = [text for text, _ in VOICE.said if not text.endswith("for that")]
    assert len(job.samples) == SAMPLES_PER_CHARACTER * sum(map(len, pieces))


async def test_two_responses_at_once_are_a_reason_for_caution_for_a_minute(stage, clock):
    async def n_begun_early(job_id: str) -> float:
        n_decided = decided(stage)
        job = FakeJob(job_id)
        running = asyncio.create_task(stage.run(job))
        # The first words last 0.38 s, and the rest has come after 0.18 s.
        await write(job, "The main reason for that is", clock, word_s=0.035)
        await until_decided(stage, 1 + n_decided)
        job.text("clear now. ", 8)
        job.end()
        await running
        return stage.load()["begun_early"]

    assert await n_begun_early("alone") == 1
    both = [asyncio.create_task(stage.run(job)) for job in (FakeJob("a"), FakeJob("b"))]
    await asyncio.sleep(0)
    for task in both:
        task.cancel()
    await asyncio.gather(*both, return_exceptions=True)
    assert await n_begun_early("soon after") == 1
    clock.now_s += 61.0
    assert await n_begun_early("a minute later") == 2


async def test_a_voice_that_estimates_its_words_does_not_begin_early(stage, clock, monkeypatch):
    monkeypatch.setattr(VOICE, "times_words", False)
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    await write(job, LONG, clock)
    job.end()
    await running
    assert all(not text.endswith("for that") for text, _ in VOICE.said)


async def test_a_text_that_ends_with_its_first_words_is_said_once(stage, clock):
    job = FakeJob("a")
    running = asyncio.create_task(stage.run(job))
    await write(job, "The main reason for that", clock)
    await until_sound(job)
    job.end()
    await running
    assert abs(len(job.samples) - SAMPLES_PER_CHARACTER * len("The main reason for that.")) <= NEAR
    assert [n for n, _ in job.marks] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("early", [False, True])
async def test_what_another_voice_has_sent_is_not_sent_again(stage, clock, monkeypatch, early):
    def synthesise(text: str, voice: str) -> Speech:
        noise = np.random.default_rng(len(text)).integers(-9000, 9000, len(text) * 480)
        ends = [i for i in range(1, len(text) + 1) if i == len(text) or text[i] == " "]
        words = tuple(SpokenWord(end, end / 50) for end in ends)
        return Speech(pcm=noise.astype(np.int16), words=words)

    monkeypatch.setattr(VOICE, "synthesise", synthesise)

    async def read(sent: SoundPlace | None = None) -> FakeJob:
        job = FakeJob("a")
        job.opener = VocoderRequest("a", 60.0, voice="anna", sent=sent)
        running = asyncio.create_task(stage.run(job))
        n_decided = decided(stage)
        await write(job, "The main reason for that is", clock, word_s=0.01 if early else 0.2)
        if sent is None:
            await until_decided(stage, 1 + n_decided)
        for n, part in enumerate(("clear now. ", "It is said ", "again. And ", "once more."), 7):
            job.text(part, n)
        job.end()
        await running
        return job

    whole = await read()
    assert stage.load()["begun_early"] == early
    sent: list[Pcm] = []
    for message in whole.sent[:-1]:
        sent.append(message)
        rest = await read(message.place)
        assert b"".join(m.pcm for m in [*sent, *rest.sent[:-1]]) == b"".join(
            m.pcm for m in whole.sent[:-1]
        )
        assert [mark for m in sent for mark in m.spoken] + rest.marks == whole.marks
