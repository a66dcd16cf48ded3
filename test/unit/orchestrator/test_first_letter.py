"""Claims about the moment at which a talker that reads tokens begins."""

from typing import Any

import pytest

from sglang_live.core import TurnRequest
from sglang_live.messages import TalkerInput, TalkerRequest
from sglang_live.orchestrator.stage_jobs import TalkerJob


class Recorder:
    """A job that keeps what is sent."""

    job_id, cancelled = "job", False

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.known: set[str] = set()

    def tensors(self) -> None:
        return None

    async def begin(self, message: Any, _tensors: Any = None) -> None:
        if callable(message):
            await message(self)
        else:
            self.sent.append(message)

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def sent(*written: tuple[list[int], str]) -> list[Any]:
    """What a talker is sent of tokens with their text."""
    job, turn = Recorder(), TurnRequest(instructions="", history=(), voice="ada")
    talker = TalkerJob(job, turn, "session", {})  # type: ignore[arg-type]
    for ids, text in written:
        await talker.write(ids, text)
    await talker.end_text()
    assert talker.ended == (not job.sent)
    return job.sent


@pytest.mark.parametrize("text", ["…", " —", "\u200b", "😀", ".", ""])
async def test_a_response_without_a_letter_or_digit_is_not_spoken(text):
    assert await sent(([1], text), ([2], text)) == []


async def test_nothing_of_a_response_is_lost_when_its_first_letter_comes():
    begun, rest, more, end = await sent(([1], "…"), ([2, 3], " "), ([4], "Yes"), ([5], "!"))
    assert isinstance(begun, TalkerRequest) and begun.first_id == 1
    assert isinstance(rest, TalkerInput) and (rest.ids, more.ids) == ([2, 3, 4], [5])
    assert end.done
