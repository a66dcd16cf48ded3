"""The Live API with OpenAI's SDK, unmodified, against the whole server.

The model delegates nothing by itself, so in that part, and where a response must be long, it is
scripted; gateway, socket and client are real.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_live.interaction.silero import SileroModel
from test.e2e.conftest import wait_until
from test.e2e.socket_client import clip_24k
from test.e2e.test_examples import PYTHON, run
from test.e2e.test_resume import N_PAGE
from test.unit.gateway.fakes import FakeOrchestrator, app_of, done, paced, spoken
from test.unit.gateway.live_server import listening
from test.unit.gateway.realtime.playback_world import WORDS, interrupted_end
from test.unit.gateway.realtime.test_input_transcription import written

pytestmark = [pytest.mark.e2e]

CLIENT = Path(__file__).parent / "clients" / "openai_live.py"
CALL = done(function_calls=('{"name": "delegate", "arguments": {}}',))
# As a busy client sees it, whose first reading may be late; exactly it is 0.1 s.
MOST_LEAD_S = 1.0


async def play(
    part: str, url: str, folder: Path, said: np.ndarray | None = None, **session: Any
) -> dict[str, Any]:
    """said: int16 at 24 kHz. session: fields of session.start."""
    recording = folder / "said.pcm"
    pcm = clip_24k("sp_librivox_0880.flac") if said is None else said
    recording.write_bytes(pcm.tobytes())
    assert PYTHON.exists(), "scripts/setup.sh --test makes it"
    more = json.dumps(session)
    printed = await run(PYTHON, CLIENT, url, recording, part, more, cwd=folder)
    told = json.loads(printed.splitlines()[-1])
    assert told["events"][-1]["type"] == "session.closed"
    n = len(told["loudness"])
    assert told["events"][-1]["usage"]["seconds"] == pytest.approx(n / 10, abs=0.2)
    # The stream is at the pace of time: never far ahead of it.
    late_s = [at_s - 0.1 * tick for tick, at_s in enumerate(told["arrivals"])]
    assert min(late_s) > -MOST_LEAD_S
    return told


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def text_of(told: dict[str, Any], whose: str) -> str:
    kind = f"session.{whose}_transcript.delta"
    return "".join(event["delta"] for event in told["events"] if event["type"] == kind)


def sounding(told: dict[str, Any]) -> list[int]:
    return [tick for tick, loudness in enumerate(told["loudness"]) if loudness]


async def test_a_spoken_question_has_a_spoken_answer(server, tmp_path):
    told = await play("speech", server.http, tmp_path)
    assert sounding(told)
    assert text_of(told, "output")
    speakers = [turn["speaker"] for turn in told["turns"]]
    assert "assistant" in speakers
    fragments = [e for e in told["events"] if e["type"] == "session.output_transcript.delta"]
    first, last = sounding(told)[0], sounding(told)[-1]
    assert 100 * first <= fragments[0]["start_ms"]
    assert fragments[-1]["end_ms"] <= 100 * (last + 12)


async def test_a_client_that_only_writes_is_spoken_to(server, tmp_path):
    told = await play("typed", server.http, tmp_path)
    assert sounding(told)


async def test_a_client_that_comes_again_with_its_history_finds_its_kv(server, tmp_path):
    def tokens() -> tuple[float, float]:
        metrics = httpx.get(f"{server.http}/metrics").text
        name = r"^sglang_live_gateway_prompt_tokens(?:_cached)?_total (\S+)$"
        found = re.findall(name, metrics, re.MULTILINE)
        return float(found[0]), float(found[1])

    said = "Then you turn left, and left again, and you see it. " * 12
    history = [message("user", "How do I find the harbour?"), message("assistant", said)]
    told = []
    for _ in range(2):
        before = tokens()
        await play("typed", server.http, tmp_path, input=history)
        n, n_cached = (now - then for now, then in zip(tokens(), before, strict=True))
        told.append((n, n_cached))
    (n, first), (again, cached) = told
    assert n == again > 300
    # What was asked last, and the page of KV that it shares with what is before.
    assert first < cached
    assert cached >= n - N_PAGE


async def test_a_muted_client_is_not_heard(server, tmp_path):
    told = await play("muted", server.http, tmp_path)
    assert not sounding(told) and not text_of(told, "input")


def test_the_sessions_are_free_afterwards(server):
    is_closed = "sglang_live_gateway_sessions_open 0.0"
    wait_until(lambda: is_closed in httpx.get(f"{server.http}/metrics").text, 15, "closed")
    server.wait_until_free()


async def test_an_interruption_is_silence_at_once(tmp_path):
    orchestrator = FakeOrchestrator([paced(WORDS, 120, asyncio.Event())], model_name="demo")

    async def interruptible() -> None:
        while not orchestrator.sessions:
            await asyncio.sleep(0.01)
        orchestrator.session.on_interrupt = [interrupted_end()]

    async with listening(app_of(orchestrator, speech_model=SileroModel())) as host:
        setting = asyncio.create_task(interruptible())
        told = await play("interrupted", f"http://{host}", tmp_path)
        await setting
    [said] = [event["tick"] for event in told["events"] if event["type"] == "said"]
    # The recording begins with 0.2 s of silence; its first word is followed by a pause.
    heard = [tick for tick in sounding(told) if tick < said + 15]
    assert said <= heard[-1] <= said + 6


async def test_the_application_does_what_is_delegated(tmp_path):
    scripts = [[*spoken("Let me look.", 800)[:-1], CALL], written("What is the weather?")]
    orchestrator = FakeOrchestrator([*scripts, spoken("It rains.", 800)], model_name="demo")
    async with listening(app_of(orchestrator, speech_model=SileroModel())) as host:
        told = await play("delegated", f"http://{host}", tmp_path)
    assert text_of(told, "input") == "What is the weather?"
    assert text_of(told, "output") == "Let me look. It rains."
    tool = [item for item in orchestrator.turns[-1].history if item.role == "tool"]
    assert tool[0].parts[0].text.endswith("It is raining.")


async def framework(
    name: str, scheme: str, folder: Path, *scripts: list, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    orchestrator = FakeOrchestrator([*scripts], model_name="demo")
    async with listening(app_of(orchestrator, speech_model=SileroModel())) as host:
        return await framework_at(f"{scheme}://{host}", name, folder, *more)


async def framework_at(url: str, name: str, folder: Path, *more: str) -> dict[str, Any]:
    recording = folder / "said.pcm"
    recording.write_bytes(clip_24k("sp_librivox_0880.flac").tobytes())
    printed = await run(PYTHON, CLIENT.with_name(name), url, recording, *more, cwd=folder)
    return json.loads(printed.splitlines()[-1])


async def test_pipecat_opens_the_conversation_and_hears_the_answer(tmp_path):
    greeting, answer = spoken("Welcome to you.", 1200), spoken("It rains.", 1200)
    heard = written("What is the weather?")
    told = await framework("pipecat_live.py", "ws", tmp_path, greeting, answer, heard)
    assert told["errors"] == []
    assert [message["content"] for message in told["messages"]] == [
        "Welcome to you.",
        "What is the weather?",
        "It rains.",
    ]
    assert told["n_sounding"] == 24


async def test_livekit_greets_and_answers_what_is_delegated(tmp_path):
    greeting, answer = spoken("Welcome to you.", 1200), spoken("It rains.", 1200)
    delegating = [*spoken("Let me look.", 800)[:-1], CALL]
    heard = written("What is the weather?")
    scripts = (greeting, delegating, heard, answer)
    told = await framework("livekit_live.py", "http", tmp_path, *scripts, more=("client",))
    assert told["errors"] == []
    assert told["greeting"] == "Welcome to you."
    assert told["answer"].split() == ["Let", "me", "look.", "It", "rains."]
    assert told["sound_s"] == pytest.approx(3.2)


async def test_livekits_functions_are_called_by_the_text_model(tmp_path):
    greeting, answer = spoken("Welcome to you.", 1200), spoken("It rains.", 1200)
    delegating = [*spoken("Let me look.", 800)[:-1], CALL]
    heard, result = written("What is the weather?"), written("Rain in Rome.")
    calls = [done(function_calls=('{"name": "weather", "arguments": {"town": "Rome"}}',))]
    scripts = (greeting, delegating, heard, calls, result, answer)
    told = await framework("livekit_live.py", "http", tmp_path, *scripts, more=("responses",))
    assert told["errors"] == []
    assert told["called"] == ["Rome"]
    assert told["answer"].split() == ["Let", "me", "look.", "It", "rains."]
