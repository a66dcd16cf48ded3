"""What of a reply leaves the thinker, and how far its consumer is said to be."""

import pytest

from sglang_live.messages import FunctionCallProgress, Heard, TextTokens
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
