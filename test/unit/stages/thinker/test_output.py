"""What of a reply leaves the thinker, and how far its consumer is said to be."""

import pytest

from sglang_live.messages import FunctionCallProgress, Heard, TextTokens
from sglang_live.models.own_voice import OwnVoice, SpokenIds
from sglang_live.models.tool_prompt import CALL_BEGIN, CALL_END, ResponseParts
from sglang_live.policy.view import FRAME_S
from sglang_live.stages.thinker.output import ResponseOutput
from sglang_live.stages.thinker.session import Generated

END, CALL = 0, 9


class FakeJob:
    job_id = "j"

    def __init__(self):
        self.sent = []

    async def send(self, message) -> None:
        self.sent.append(message)


class Written:
    """A reply, token by token."""

    def __init__(self):
        self.job, self.told = FakeJob(), []
        self.reply = ResponseOutput(self.job, (END,), ResponseParts(CALL), self.told.append)
        self._ids, self._text = [], ""

    async def write(self, token_id: int, text: str, finish: str | None = None) -> None:
        self._ids, self._text = [*self._ids, token_id], self._text + text
        await self.reply.take(Generated(list(self._ids), self._text, finish))


@pytest.fixture
def written() -> Written:
    return Written()


async def test_text_is_sent_as_it_comes_and_the_talkers_progress_passed_on(written):
    await written.write(1, "One")
    written.reply.heard(Heard("j", 0.5, True))
    await written.write(2, " two")
    await written.write(END, "", "stop")
    assert written.job.sent == [TextTokens("j", [1], "One"), TextTokens("j", [2], " two")]
    assert written.told == [Heard("j", 0.5, True)]
    assert written.reply.ids == [1, 2] and written.reply.finish == "stop"


async def test_tokens_of_a_function_call_count_as_consumed_at_once(written):
    await written.write(1, "Yes")
    await written.write(CALL, CALL_BEGIN)
    written.reply.heard(Heard("j", 1.0, True))
    await written.write(3, "{}")
    heard_s = [progress.heard_s for progress in written.told]
    assert heard_s == pytest.approx([FRAME_S, 1.0 + FRAME_S, 1.0 + 2 * FRAME_S])
    assert written.told[-1].advancing


async def test_a_long_function_call_sends_progress_and_no_text(written):
    await written.write(CALL, CALL_BEGIN)
    assert len(written.job.sent) == 1, "a call has begun"
    for _ in range(100):
        await written.write(3, "x")
    await written.write(4, CALL_END)
    assert set(map(type, written.job.sent)) == {FunctionCallProgress}
    assert 5 <= len(written.job.sent) <= 10
    assert written.reply.parts.calls() == ["x" * 100]


@pytest.mark.parametrize("finish", ["length", "interrupted"])
async def test_a_reply_that_is_cut_ends_in_a_whole_character(written, finish):
    await written.write(1, "caf")
    await written.write(2, "\ufffd", finish)
    assert "".join(message.text for message in written.job.sent) == "caf"
    assert written.reply.parts.spoken == "caf"


async def test_what_another_thinker_has_sent_is_not_sent_again(written):
    written.reply.continues([1, 2], "One two")
    assert (written.reply.ids, written.reply.parts.spoken) == ([1, 2], "One two")
    written._ids, written._text = [1, 2], "One two"
    await written.write(3, " three")
    await written.write(END, "", "stop")
    assert written.job.sent == [TextTokens("j", [3], " three")]
    assert written.reply.ids == [1, 2, 3]


VOICE = OwnVoice(first_id=100, n_codes=50, frame_s=0.04, chunk_frames=2, frames_per_token=1.0)


@pytest.fixture
def speaking() -> Written:
    """Of a thinker that speaks itself; the engine's text has its codes in it."""
    written = Written()
    names = {CALL: CALL_BEGIN, 3: "{}", 4: CALL_END}
    speech = SpokenIds(VOICE, lambda ids: "".join(names.get(one, chr(one)) for one in ids))
    written.reply = ResponseOutput(
        written.job, (END,), ResponseParts(CALL), written.told.append, speech
    )
    return written


async def test_codes_leave_with_the_text_that_they_say(speaking):
    for token, text in ((65, "A"), (66, "B"), (107, "<7>"), (108, "<8>"), (67, "C")):
        await speaking.write(token, text)
    await speaking.write(END, "", "stop")
    assert speaking.job.sent == [
        TextTokens("j", [65], ""),
        TextTokens("j", [66], ""),
        TextTokens("j", [107], "A", b"\x07\x00", [(3, 0.04)]),
        TextTokens("j", [108], "B", b"\x08\x00", [(4, 0.08)]),
        TextTokens("j", [67], ""),
        TextTokens("j", [], "C"),
    ]
    assert speaking.reply.parts.spoken == "ABC"


async def test_a_call_behind_speech_has_no_sound(speaking):
    for token in (65, 107, CALL, 3, 4):
        await speaking.write(token, "")
    await speaking.write(END, "", "stop")
    assert speaking.job.sent == [
        TextTokens("j", [65], ""),
        TextTokens("j", [107], "A", b"\x07\x00", [(2, 0.04)]),
        FunctionCallProgress("j"),
    ]
    assert (speaking.reply.parts.spoken, speaking.reply.parts.calls()) == ("A", ["{}"])


async def test_ids_that_come_at_once_leave_one_by_one(speaking):
    await speaking.reply.take(Generated([65, 66, 107, 108, END], "AB", "stop"))
    assert [(m.ids, m.text) for m in speaking.job.sent] == [
        ([65], ""),
        ([66], ""),
        ([107], "A"),
        ([108], "B"),
    ]
    assert speaking.reply.ids == [65, 66, 107, 108] and speaking.reply.finish == "stop"


async def test_text_that_codes_say_counts_as_heard_at_once(speaking):
    await speaking.write(65, "A")
    await speaking.write(107, "")
    speaking.reply.heard(Heard("j", 0.02, True))
    await speaking.write(66, "B")
    heard_s = [news.heard_s for news in speaking.told]
    assert heard_s == pytest.approx([0.04, 0.02 + 0.04, 0.02 + 2 * 0.04])


async def test_all_frames_of_a_response_that_goes_on_come_again(speaking):
    speaking.reply.continues([65, 107], "A")
    speaking._ids, speaking._text = [65, 107], "A"
    await speaking.write(108, "")
    assert speaking.job.sent == [
        TextTokens("j", [108], "", b"\x07\x00\x08\x00", [(2, 0.04), (3, 0.08)])
    ]
