"""One search for a session's id finds an interrupted turn in the logs of all processes."""

import asyncio
import re
from dataclasses import dataclass
from itertools import pairwise

import pytest

from test.e2e.conftest import Server, wait_until
from test.e2e.interrupter import (
    DONE,
    TEXT,
    UnsuitableResponse,
    long_response,
    speech_over_response,
    truncated,
    until_suitable,
    voice,
)
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]

LINE = re.compile(
    r"^(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) "
    r"(?:(?P<process>(?:thinker|talker|vocoder)/0(?: engine)?) )?INFO "
    r"sglang_live\.(?P<room>\w+)[\w.]*: (?P<event>\w+)"
)
INTERRUPTED = "turn_interrupted"


@dataclass(frozen=True)
class Line:
    """number: of the line in its file."""

    file: str
    number: int
    time: str
    process: str
    event: str
    text: str

    def is_before(self, other: "Line") -> bool:
        """By the order in one file, else by times, which have milliseconds."""
        if self.file == other.file:
            return self.number < other.number
        return self.time <= other.time


def lines_of(server: Server, session_id: str) -> list[Line]:
    """All log lines with the id."""
    found = []
    for path in server.log_dir.glob("*.log"):
        for number, text in enumerate(path.read_text().splitlines()):
            if session_id in text:
                match = LINE.match(text)
                assert match, f"{path.name}: {text}"
                process = match["process"] or match["room"]
                found.append(Line(path.name, number, match["time"], process, match["event"], text))
    return found


@until_suitable
async def test_a_search_for_the_session_finds_the_turn_in_every_process(server):
    async with connected(server.ws) as socket:
        session_id = socket.events[0]["session"]["id"]
        await socket.ask("hello", **TEXT)
        await long_response(socket, 0.5)
        speaking = asyncio.create_task(socket.speak(voice()))
        try:
            _, done = await speech_over_response(socket)
            await truncated(socket)
            if not is_whole(await socket.until(DONE)):
                raise UnsuitableResponse
        finally:
            speaking.cancel()
    response_id = done["response"]["id"]

    def is_closed() -> bool:
        return any(line.event == "session_closed" for line in lines_of(server, session_id))

    wait_until(is_closed, 10, "the session's last line")
    lines = lines_of(server, session_id)
    turn = f"{session_id}.00000002"

    def line(process: str, event: str, *texts: str) -> Line:
        found = [
            line
            for line in lines
            if (line.process, line.event) == (process, event)
            and all(text in line.text for text in texts)
        ]
        assert len(found) == 1, (process, event, texts, found)
        return found[0]

    def check_order(*steps: tuple[str, ...]) -> None:
        for one, next_one in pairwise(line(*step) for step in steps):
            assert one.is_before(next_one), f"{next_one.text}\nis before\n{one.text}"

    if not any(found.event == INTERRUPTED for found in lines):
        raise UnsuitableResponse  # it was generated to its end before
    interrupted = line("orchestrator", INTERRUPTED, turn)
    # A preheat or a turn prefill in between has a number, too.
    started = [found.text for found in lines if found.event == "turn_started"]
    assert len(started) == 3, started
    next_turn = started[-1].partition("turn=")[2].split()[0]
    assert next_turn > turn
    check_order(
        ("gateway", "session_opened"),
        ("orchestrator", "turn_started", turn),
        ("thinker/0", "job_started", turn),
        ("thinker/0 engine", "request_queued", turn),
        ("talker/0", "job_started", turn),
        ("talker/0 engine", "request_queued", turn),
        ("vocoder/0", "job_started", turn),
        ("interaction", "first_audio", response_id),
        ("orchestrator", INTERRUPTED, turn),
        ("vocoder/0", "job_cancelled", turn),
    )
    check_order(
        ("orchestrator", INTERRUPTED, turn),
        ("orchestrator", "turn_done", turn, "status=interrupted"),
        ("orchestrator", "turn_started", next_turn),
        ("thinker/0 engine", "session_truncated", f"{session_id}-kv"),
        ("orchestrator", "turn_done", next_turn),
        ("gateway", "session_closed"),
    )
    check_order(
        ("thinker/0 engine", "request_finished", turn),
        ("thinker/0", "job_started", next_turn),
    )
    if interrupted.is_before(line("thinker/0", "job_done", turn)):  # else its text was complete
        check_order(
            ("orchestrator", INTERRUPTED, turn),
            ("thinker/0 engine", "request_interrupted", turn),
            ("thinker/0 engine", "request_finished", turn),
        )
    check_order(
        ("orchestrator", INTERRUPTED, turn),
        ("talker/0", "job_cancelled", turn),
        ("talker/0 engine", "request_finished", turn, "reason=abort"),
    )
    check_order(
        ("interaction", "response_created", response_id),
        ("interaction", "first_audio", response_id),
        ("interaction", "response_done", response_id, "status=cancelled"),
        ("interaction", "barge_in", response_id),
    )
