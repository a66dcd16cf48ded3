"""Text of clients and models cannot write a line of its own into a log."""

import io
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_live
from sglang_live.telemetry.log_lines import LineFormatter, LineRecord, log_in_lines, one_line

SOURCES = Path(sglang_live.__file__).parent
FORGED = "x\n2026-01-01 INFO sglang_live: forged\r\x1b[31m\u2028\u202eabc\x85\ud800"


@pytest.fixture
def stream():
    """The output of a logger of this process."""
    before = logging.getLogRecordFactory()
    log, out = logging.getLogger("test_log_lines"), io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    log_in_lines()
    yield out
    logging.setLogRecordFactory(before)
    log.removeHandler(handler)


def test_a_record_is_one_line(stream):
    logging.getLogger("test_log_lines").warning("name=%s", FORGED)
    [line] = stream.getvalue().splitlines()
    assert line.startswith("WARNING test_log_lines: name=x\\n2026")
    assert line.isprintable()


def test_a_library_with_its_own_formatter_writes_one_line_too(stream):
    record = logging.getLogger("other").makeRecord("o", 20, "f", 1, "%s", (FORGED,), None)
    assert isinstance(record, LineRecord)
    assert logging.Formatter("%(message)s").format(record).isprintable()


def test_an_exceptions_text_cannot_begin_a_line(stream):
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("test_log_lines").exception("it failed")
    first, *others = stream.getvalue().split("\n")[:-1]
    assert first == "ERROR test_log_lines: it failed"
    assert others and all(line.startswith("  | ") and line.isprintable() for line in others)


@given(st.text(st.characters(), max_size=30))
def test_any_text_becomes_one_line_and_keeps_its_words(text):
    line = one_line(text)
    assert len(line.splitlines()) <= 1
    assert "\x1b" not in line and "\r" not in line
    line.encode()
    if text.isprintable():
        assert line == text


@pytest.mark.parametrize("text", ["Grüße, 世界 🙂", "a\tb", "back\\slash", ""])
def test_harmless_text_is_unchanged(text):
    assert one_line(text) == text


def test_every_process_that_sets_up_logging_uses_it():
    """The server, the stages, and the plugin that all processes of SGLang load."""
    texts = {path: path.read_text() for path in SOURCES.rglob("*.py")}
    users = {path.name for path, text in texts.items() if re.search(r"\blog_in_lines\(", text)}
    assert users >= {"launch_server.py", "runtime.py", "plugin.py"}
    set_up = {path.name for path, text in texts.items() if "logging.basicConfig(" in text}
    assert set_up == {"log_lines.py"}
