"""The command with --live, against the gateway on a real socket."""

import asyncio
import json

import pytest

from sglang_live.client import clip
from sglang_live.client.__main__ import main, parse_args
from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import FakeOrchestrator, app_of, spoken
from test.unit.gateway.live_server import listening


async def run(address: str, *args: str, query: str = "") -> int:
    url = f"ws://{address}/v1/live/sessions{query}"
    return await asyncio.to_thread(main, ["--live", "--url", url, "--json", *args])


async def test_a_question_and_a_text_have_spoken_answers(capsys, tmp_path):
    orchestrator = FakeOrchestrator([spoken("Welcome.", 800), spoken("It is Paris.", 1600)])
    app = app_of(orchestrator, speech_model=SileroModel())
    out = tmp_path / "out.wav"
    async with listening(app) as address:
        question = ("--wav", str(clip.BUNDLED_CLIP))
        code = await run(address, "--text", "Greet.", *question, "--out", str(out))
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, summary
    assert [turn["kind"] for turn in summary["turns"]] == ["text", "speech"]
    assert summary["turns"][0]["transcript"] == "Welcome."
    assert summary["turns"][1]["transcript"].strip() == "It is Paris."
    assert summary["audio_s"] == pytest.approx(2.4)
    assert summary["turns"][1]["ttfp_ms"] > 500
    assert out.exists()


async def test_a_refused_start_is_exit_code_1_with_the_reason(capsys):
    async with listening(app_of(FakeOrchestrator())) as address:
        code = await run(address, "--text", "Hi", "--voice", "nemo")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    assert "nemo" in summary["error"]


async def test_a_refused_connection_is_exit_code_1_with_the_reason(capsys):
    async with listening(app_of(FakeOrchestrator())) as address:
        code = await run(address, "--text", "Hi", query="?model=demo")
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    assert "model" in summary["error"]


def test_the_default_url_is_of_the_protocol():
    assert parse_args(["--text", "x"])[0].url.endswith("/v1/realtime")
    assert parse_args(["--live", "--text", "x"])[0].url.endswith("/v1/live/sessions")
    with pytest.raises(SystemExit):
        parse_args(["--live", "--push-to-talk", "--text", "x"])
