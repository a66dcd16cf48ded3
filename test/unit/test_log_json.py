"""Log lines carry the ids of their task, as text and as JSON objects."""

import asyncio
import io
import json
import logging
import logging.config
import os
import sys

import pytest

from sglang_live.stages.stage_logs import StageLogs
from sglang_live.telemetry.log_context import log_ids, set_log_ids
from sglang_live.telemetry.log_json import JsonFormatter, as_json_line, text_lines
from sglang_live.telemetry.log_lines import (
    LineFormatter,
    LineRecord,
    engine_logging,
    formatter,
    log_in_lines,
    logs_json,
)


def record(template: str, *args, error: bool = False) -> logging.LogRecord:
    exc_info = sys.exc_info() if error else None
    return LineRecord("sglang_live.test", logging.INFO, "f.py", 1, template, args, exc_info)


def as_object(template: str, *args, **kwargs) -> dict:
    line = JsonFormatter("thinker/0").format(record(template, *args, **kwargs))
    assert "\n" not in line
    return json.loads(line)


def test_an_event_and_its_values_are_fields():
    line = as_object("turn_done session=%s status=%s n=%d share=%.2f", "s", "completed", 3, 0.123)
    assert line["event"] == "turn_done" and line["session"] == "s"
    assert line["n"] == 3 and line["share"] == 0.123
    assert line["message"] == "turn_done session=s status=completed n=3 share=0.12"
    assert line["process"] == "thinker/0" and line["level"] == "INFO"


def test_an_event_without_values_has_its_name_alone():
    assert as_object("stage_failed")["event"] == "stage_failed"


@pytest.mark.parametrize("template, args", [("100%% of %s", ("it",)), ("Some sentence.", ())])
def test_other_texts_are_messages(template, args):
    line = as_object(template, *args)
    assert "event" not in line and line["message"] == template % args


def test_a_value_cannot_take_the_place_of_a_field_of_the_line():
    line = as_object("bad level=%s message=%s", "forged", "text")
    assert line["level"] == "INFO" and line["message"] == "bad level=forged message=text"


def test_a_traceback_is_a_field_and_its_lines_are_found_again():
    try:
        raise ValueError("too long\nby two lines")
    except ValueError:
        line = JsonFormatter().format(record("it_failed", error=True))
    lines = text_lines(line.encode())
    assert lines[0] == "it_failed" and lines[-2:] == ["ValueError: too long", "by two lines"]


def test_lines_of_a_task_carry_its_ids_and_those_of_the_task_that_made_it():
    formatter = LineFormatter("%(message)s")

    async def turn(name: str) -> list[str]:
        set_log_ids(turn=name)
        await asyncio.sleep(0)
        return [formatter.format(record("begun")), formatter.format(record("over turn=%s", name))]

    async def session() -> list[list[str]]:
        set_log_ids(session="s")
        return await asyncio.gather(turn("s.1"), turn("s.2"))

    assert asyncio.run(session()) == [
        ["begun session=s turn=s.1", "over turn=s.1 session=s"],
        ["begun session=s turn=s.2", "over turn=s.2 session=s"],
    ]
    assert log_ids() == {}


def test_ids_are_fields_of_an_object():
    async def line() -> dict:
        set_log_ids(session="s", turn="s.1")
        return as_object("begun")

    found = asyncio.run(line())
    assert (found["session"], found["turn"]) == ("s", "s.1")


@pytest.mark.parametrize(
    "line, message",
    [
        (b"Segmentation fault", "Segmentation fault"),
        (b'{"half', '{"half'),
        (b"{1, 2}", "{1, 2}"),
        (b"[]", "[]"),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_is_printed_without_the_logger_becomes_an_object(line, message):
    assert json.loads(as_json_line(line, "talker/1")) == {
        "process": "talker/1",
        "message": message,
    }


def test_a_line_that_is_nested_too_deep_to_parse_is_text():
    line = b'{"a":' * 100_000
    assert json.loads(as_json_line(line, "talker/1"))["message"] == line.decode()
    assert text_lines(line) == [line.decode()]


def test_stage_logs_hold_objects_only_and_tell_the_last_lines_as_text(tmp_path):
    logs = StageLogs(tmp_path, as_json=True)
    fd = logs.open("thinker/0")
    os.write(fd, b'{"message": "ready"}\nRuntimeError: broken\n')
    os.close(fd)
    assert logs.last_lines("thinker/0", wait_s=5.0) == ["ready", "RuntimeError: broken"]
    logs.close()
    lines = (tmp_path / "thinker-0.log").read_text().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["ready", "RuntimeError: broken"]


@pytest.fixture
def root():
    """The root logger and the record factory, restored afterwards."""
    root, factory = logging.getLogger(), logging.getLogRecordFactory()
    handlers, level = root.handlers[:], root.level
    yield root
    logging.captureWarnings(False)
    logging.setLogRecordFactory(factory)
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("as_json", [False, True])
def test_the_format_of_a_process_can_be_chosen_again(root, monkeypatch, as_json):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    log_in_lines("talker/0")
    log_in_lines("talker/0", as_json=as_json)
    logging.getLogger("sglang_live.x").info("frames_late n=%d", 2)
    [line] = out.getvalue().splitlines()
    if as_json:
        assert json.loads(line)["n"] == 2
    else:
        assert line.endswith("talker/0 INFO sglang_live.x: frames_late n=2")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_engines_processes_write_lines_of_the_same_form(root, monkeypatch, as_json):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logging.config.dictConfig(json.loads(json.dumps(engine_logging("thinker/0", as_json))))
    logging.getLogger("sglang.srt").info("not shown")
    logging.getLogger("sglang_live.bridge").info("request_queued rid=%s", "think-1")
    logging.getLogger("sglang_live").setLevel(logging.NOTSET)
    [line] = out.getvalue().splitlines()
    if as_json:
        assert json.loads(line)["rid"] == "think-1"
    else:
        assert line.endswith("thinker/0 INFO sglang_live.bridge: request_queued rid=think-1")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_process_knows_how_those_that_it_starts_should_write(monkeypatch, as_json):
    handler = logging.StreamHandler()
    handler.setFormatter(formatter("", as_json))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    assert logs_json() == as_json
