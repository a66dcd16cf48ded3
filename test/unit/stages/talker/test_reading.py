"""A talker stage whose model reads text: it begins with the first words that are said of it."""

import asyncio
from types import SimpleNamespace

from sglang_live.messages import Heard, TalkerDone, TalkerInput, TalkerRequest, TalkerText
from sglang_live.models.family import TextReader
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.talker.stage import TalkerStage

END = 9


class FakeHost:
    """Speaks one frame."""

    context_tokens = 100

    def __init__(self, stage: TalkerStage):
        self.stage, self.prompts = stage, []

    async def stream(self, rid: str, *, input_ids: list[int], **_request):
        self.prompts.append(input_ids)
        await asyncio.sleep(0)
        self.stage._frames[rid].put(0, [7])
        yield {"output_ids": [7, 8], "meta_info": {"finish_reason": {"type": "stop"}}}


class FakeJob:
    job_id = "job"
    frames = ()

    def __init__(self, messages: list):
        self.opener = TalkerRequest("job", "s", [], [], "anna", None, None, 0, 60.0)
        self.sent: list = []
        self._messages = iter(messages)

    async def inputs(self):
        for message in self._messages:
            yield message

    async def send(self, message) -> None:
        self.sent.append(message)


class FakeProgress:
    def __init__(self):
        self.put_s: list[float] = []

    def put(self, rid: str, progress: Heard) -> None:
        self.put_s.append(progress.heard_s)

    def forget(self, rid: str) -> None: ...


def reading_stage() -> TalkerStage:
    """Ids are the lengths of words."""
    stage = object.__new__(TalkerStage)
    stage._frames, stage._heard = {}, FakeProgress()
    stage._bounds, stage._n_dropped, stage._n_unspeakable = False, 0, 0
    stage._stream_events = SimpleNamespace(add=lambda *a: None, remove=lambda *a: None)
    stage.fed = []
    stage._feed = SimpleNamespace(send=stage.fed.append)
    stage._segments = SimpleNamespace(
        keep_only=lambda *a: None, missing=lambda *a: [], close=lambda *a: None
    )
    stage._announce = lambda request, session, first_id: ("speak-job", [1, first_id])
    encode = lambda text: [len(word) for word in text.split()]  # noqa: E731
    stage.model = SimpleNamespace(text_end_id=END, reads=TextReader(encode, SpeechStyle()))
    stage.host = FakeHost(stage)
    return stage


async def run(stage: TalkerStage, *messages) -> FakeJob:
    job = FakeJob(list(messages))
    await stage.run(job)
    return job


def texts(stage: TalkerStage) -> list[tuple[list[int], bool]]:
    return [(m.ids, m.done) for m in stage.fed if isinstance(m, TalkerText)]


async def test_the_prompt_ends_with_the_first_spoken_id_and_the_rest_follows():
    stage = reading_stage()
    job = await run(
        stage,
        TalkerInput("job", [], text="**We go"),
        Heard("job", 0.5, True),
        TalkerInput("job", [], text=" home** to"),
        TalkerInput("job", [], text="morrow.", done=True),
    )
    assert stage.host.prompts == [[1, 2]]
    ids = [token for some, _ in texts(stage) for token in some]
    assert ids == [2, 4, 9, END]
    assert [done for _, done in texts(stage)][-1]
    # Also what came before the first word.
    assert stage._heard.put_s == [0.5]
    assert job.sent[-1] == TalkerDone("job", finish="stop", n_frames=1, n_read=4)


async def test_a_text_of_which_nothing_is_said_has_no_speech():
    stage = reading_stage()
    job = await run(
        stage, TalkerInput("job", [], text="😀 😀\n"), TalkerInput("job", [], done=True)
    )
    assert job.sent == [TalkerDone("job", finish="stop", n_frames=0)]
    assert stage.host.prompts == [] and stage.fed == []


async def test_letters_without_a_sound_are_counted():
    stage = reading_stage()
    await run(stage, TalkerInput("job", [], text="Go \u6cb3 home.", done=True))
    assert stage._n_unspeakable == 1
