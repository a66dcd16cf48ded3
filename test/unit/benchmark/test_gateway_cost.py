"""The parts of the comparison: recording, echo server, users, evaluation."""

import base64
import json
import os
import subprocess
import sys

import pytest
from websockets.sync.client import connect

from benchmark import gateway_cost
from benchmark.gateway_cost import Cost, Options
from benchmark.gateway_servers import echo, gateway
from benchmark.gateway_servers.process import ServerProcess
from benchmark.gateway_servers.users import Users, period
from sglang_live.client import clip
from sglang_live.clock import SimClock
from sglang_live.core import (
    AudioDelta,
    HistoryItem,
    TextPart,
    TranscriptDelta,
    TurnDone,
    TurnRequest,
)
from sglang_live.kv.retention import RetentionConfig


def cost(arm: str, cpu_s: float, audio_s: float, late_share: float = 0.0) -> Cost:
    return Cost(
        arm=arm,
        cpu_s=cpu_s,
        audio_s=audio_s,
        cpu_ms_per_s=1e3 * cpu_s / audio_s,
        n_deltas=1,
        delta_bytes=100,
        n_responses=1,
        late_share=late_share,
        lag_ms=[0.1, 1.0, 5.0],
        behind_ms=[60.0, 110.0, 150.0],
        rss_mb=[100.0, 101.0],
    )


class EchoSocket:
    """A socket with n silent appends, which records the sent events."""

    def __init__(self, n_appends: int):
        self.left = n_appends
        self.sent: list[bytes] = []

    async def accept(self) -> None: ...

    async def receive_text(self) -> str:
        if not self.left:
            raise echo.WebSocketDisconnect()
        self.left -= 1
        return period(b"", quiet_s=clip.FRAME_S)[0]

    async def send_text(self, text: str) -> None:
        event = json.loads(text)
        assert event["type"] == "response.output_audio.delta"
        self.sent.append(base64.b64decode(event["delta"]))


async def test_the_recording_arrives_whole_in_chunks_of_the_vocoders_size(monkeypatch):
    monkeypatch.setattr(gateway, "FIRST_AUDIO_S", 0.0)
    monkeypatch.setattr(gateway, "SPEED", 1e6)
    session = await gateway.FakeOrchestrator(response_s=1.0).open_session("s")
    turn = TurnRequest(turn_id="t", instructions="", history=(), voice="reader")
    events = [event async for event in session.respond(turn)]
    chunks_s = [clip.duration_s(e.pcm) for e in events if isinstance(e, AudioDelta)]
    assert chunks_s == pytest.approx([0.16, 0.32, 0.32, 0.2])
    assert sum(isinstance(event, TranscriptDelta) for event in events) == 3
    assert isinstance(events[-1], TurnDone)


async def test_the_turn_reports_the_items_that_a_session_would_have_dropped(monkeypatch):
    monkeypatch.setattr(gateway, "FIRST_AUDIO_S", 0.0)
    monkeypatch.setattr(gateway, "SPEED", 1e6)
    session = await gateway.FakeOrchestrator(response_s=1.0).open_session("s")
    items = [(str(i), TextPart("word " * 100)) for i in range(4)]
    history = tuple(HistoryItem(key=key, role="user", parts=(part,)) for key, part in items)

    async def gone(window_tokens: int) -> tuple[str, ...]:
        kept = RetentionConfig(window_tokens=window_tokens, slack_tokens=50)
        turn = TurnRequest(
            turn_id="t", instructions="", history=history, voice="reader", retention=kept
        )
        [done] = [e async for e in session.respond(turn) if isinstance(e, TurnDone)]
        return done.gone

    assert await gone(350) == ()
    assert await gone(220) == ("0",)  # a second one would leave less than the window
    assert await gone(100) == ("0", "1", "2")


async def test_the_echo_sends_the_configured_amount():
    app = echo.build_app(delta_bytes=960, out_per_in=0.5)
    (route,) = [route for route in app.routes if route.path == "/v1/realtime"]
    socket = EchoSocket(n_appends=100)
    await route.endpoint(socket)
    assert [len(pcm) for pcm in socket.sent] == [960] * 50


def test_a_period_is_the_clip_and_then_silence_in_frames_of_20_ms():
    messages = period(b"\1" * (2 * clip.FRAME_BYTES), quiet_s=0.1)
    assert len(messages) == 2 + 5
    assert messages[0] == messages[1] != messages[2] == messages[-1]
    assert len(period(b"\1" * (4 * clip.FRAME_BYTES), quiet_s=0.2, frames_per_message=2)) == 2 + 5


class TurnEndSocket:
    """A socket that sends the end of a turn at once, and then closes."""

    def __init__(self, audio_end_ms: int):
        self.events = [{"type": "input_audio_buffer.speech_stopped", "audio_end_ms": audio_end_ms}]

    def __aiter__(self):
        return self

    async def __anext__(self) -> str:
        if not self.events:
            raise StopAsyncIteration
        return json.dumps(self.events.pop())


@pytest.mark.parametrize(("audio_end_ms", "behind_s"), [(1000, 0.1), (1001, 0.0), (950, 0.1)])
async def test_the_lag_of_a_turn_counts_from_the_due_time_of_its_last_message(
    audio_end_ms, behind_s
):
    clock = SimClock()
    users = Users("ws://unused", [], 0.1, None, clock)
    began_s = clock.now_s() - 1.0  # so the message that ends at 1.0 s was due 0.1 s ago
    with pytest.raises(ConnectionError):
        await users._listen(TurnEndSocket(audio_end_ms), began_s)
    assert users.traffic.behind_s == pytest.approx([behind_s])


def test_the_ratio_is_of_cpu_per_second_of_session_over_all_repeats():
    costs = [cost("gateway", 2.0, 10.0), cost("echo", 0.5, 5.0), cost("gateway", 4.0, 10.0)]
    assert gateway_cost.ratio(costs) == pytest.approx(3.0)


def test_the_table_notes_that_the_machine_was_short_of_cpu():
    calm = [cost("gateway", 2.0, 10.0), cost("echo", 1.0, 10.0)]
    assert "too small" not in gateway_cost.table(calm)
    assert "too small" in gateway_cost.table([cost("gateway", 2.0, 10.0, late_share=0.2), calm[1]])


def test_bad_options_are_refused():
    with pytest.raises(ValueError):
        Options(sessions=0)
    with pytest.raises(SystemExit):
        gateway_cost.parse(["--seconds", "-1"])


def test_cpu_time_of_a_process_grows_with_its_work():
    server = ServerProcess("unused")
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as server._process:
        while server.cpu_s() < 0.05:
            os.sched_yield()
        server._process.kill()


def test_the_gateway_serves_the_recording():
    """Whatever the gateway asks its orchestrator for, the recording's has."""
    with ServerProcess("gateway", 0.5) as server, connect(server.url) as socket:
        content = [{"type": "input_text", "text": "hello"}]
        item = {"type": "message", "role": "user", "content": content}
        socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        socket.send(json.dumps({"type": "response.create"}))
        while (event := json.loads(socket.recv(timeout=20)))["type"] != "response.done":
            assert event["type"] != "error", event
    assert event["response"]["status"] == "completed"
