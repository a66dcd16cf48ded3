"""A session's timeline as a trace, sent to a collector that listens on loopback."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_live.extensions.traces.__main__ import main
from sglang_live.extensions.traces.spans import export, trace_id
from sglang_live.interaction.timeline import Timeline

MARKS = {
    "thinker_first_token": 0.1,
    "talker_first_frame": 0.2,
    "first_audio": 0.3,
    "thinker_done": 0.5,
    "talker_done": 0.9,
    "turn_done": 1.0,
}


def timeline(status: str = "completed", marks: dict[str, float] = MARKS) -> Timeline:
    made = Timeline("sess_1", began_s=100.0, began_unix_s=1000.0)
    made.add("speech_started", 101.3, onset_t_s=1.0)
    made.add("speech_stopped", 103.0, reason="silence")
    made.add("response_created", 103.0, response="resp_1")
    made.add("first_audio", 103.3, response="resp_1")
    made.add("turn_result", 104.0, response="resp_1", n_tokens=7, marks=marks)
    made.add("response_done", 104.1, response="resp_1", status=status)
    return made


def spans_of(made: Timeline) -> dict[str, dict]:
    [resource] = export(made.to_json(), "host-a")["resourceSpans"]
    [scope] = resource["scopeSpans"]
    return {span["name"]: span for span in scope["spans"]}


def seconds(span: dict) -> tuple[float, float]:
    """Since the session began."""
    times = (int(span[f"{end}TimeUnixNano"]) / 1e9 - 1000 for end in ("start", "end"))
    return tuple(round(time, 3) for time in times)


def test_the_stages_of_a_response_are_its_children_with_the_times_of_the_turn():
    spans = spans_of(timeline())
    assert {name: seconds(span) for name, span in spans.items()} == {
        "session": (0.0, 4.1),
        "user speaks": (1.0, 3.0),
        "response": (3.0, 4.1),
        "thinker": (3.0, 3.5),
        "talker": (3.1, 3.9),
        "vocoder": (3.2, 4.0),
    }
    assert {span["traceId"] for span in spans.values()} == {trace_id("sess_1")}
    assert len({span["spanId"] for span in spans.values()}) == len(spans)
    names = {span["spanId"]: name for name, span in spans.items()} | {"": ""}
    parents = {name: names[span["parentSpanId"]] for name, span in spans.items()}
    stages = dict.fromkeys(("thinker", "talker", "vocoder"), "response")
    assert parents == {"session": "", "user speaks": "session", "response": "session"} | stages
    assert [event["name"] for event in spans["vocoder"]["events"]] == ["first_audio"]


def test_a_response_that_failed_has_no_stages_and_an_error():
    spans = spans_of(timeline("failed", marks={"thinker_first_token": 0.1}))
    assert spans["response"]["status"] == {"code": 2}
    assert set(spans) == {"session", "user speaks", "response"}


def test_a_written_response_has_only_the_thinker():
    marks = {"thinker_first_token": 0.1, "thinker_done": 0.5, "turn_done": 0.6}
    assert set(spans_of(timeline(marks=marks))) & {"talker", "vocoder", "thinker"} == {"thinker"}


@pytest.fixture
def collector():
    """Its URL, the bodies that it got, and the status that it answers with."""
    got, answers = [], [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, self.headers["x-key"], json.loads(body)))
            self.send_response(answers[-1])
            self.end_headers()

        def log_message(self, *_):
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", got, answers
        server.shutdown()


def test_what_was_sent_is_deleted_and_what_was_not_is_kept(tmp_path, collector):
    url, got, answers = collector
    timeline().write(tmp_path)
    (tmp_path / "half.json").write_text('{"session": "sess_2", "ev')
    command = [str(tmp_path), "--endpoint", url, "--header", "x-key=k", "--once"]
    answers.append(503)
    assert main(command) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"sess_1.json", "half.json"}
    answers.append(200)
    assert main(command) == 1  # the half one
    assert {path.name for path in tmp_path.iterdir()} == {"half.json"}
    assert [path for path, *_ in got] == ["/v1/traces"] * 2
    assert got[-1][1:] == ("k", export(timeline().to_json(), host_of(got[-1][2])))


def host_of(body: dict) -> str:
    attributes = body["resourceSpans"][0]["resource"]["attributes"]
    return next(one["value"]["stringValue"] for one in attributes if one["key"] == "host.name")


@pytest.mark.parametrize(
    "arguments",
    [["absent", "--endpoint", "http://x"], [".", "--endpoint", "x:1"], ["."]],
)
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
