"""The command, in a thread next to the scripted server."""

import asyncio
import json

import pytest
import soundfile

from sglang_live.client import clip
from sglang_live.client.__main__ import main, parse_args


@pytest.fixture
def short_wav(tmp_path, speech):
    path = tmp_path / "in.wav"
    clip.write_wav(path, speech)
    return path


@pytest.fixture(autouse=True)
def fast(monkeypatch, fast_clock):
    monkeypatch.setattr("sglang_live.client.__main__.MonotonicClock", lambda: fast_clock)


async def run(server, *args) -> int:
    return await asyncio.to_thread(main, ["--url", server.url, *map(str, args)])


async def test_the_last_line_is_one_json_object(fake_server, short_wav, tmp_path, capsys):
    async with fake_server() as server:
        out = tmp_path / "responses.wav"
        args = ("--wav", short_wav, "--wav", short_wav, "--out", out, "--json")
        code = await run(server, *args)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert summary["status"] == "completed"
    assert summary["ttfp_ms"] > summary["end_of_turn_ms"] > 0
    assert summary["audio_s"] == pytest.approx(0.6)
    assert summary["gaps_over_100ms"] >= 0
    assert summary["transcript"].startswith("word0")
    assert len(summary["turns"]) == 2
    assert soundfile.info(out).duration == pytest.approx(0.3 + 0.5 + 0.3)


async def test_text_and_speech_mix_in_the_order_given(fake_server, short_wav, capsys):
    async with fake_server() as server:
        code = await run(server, "--text", "Hello?", "--wav", short_wav, "--json")
    turns = json.loads(capsys.readouterr().out)["turns"]
    assert code == 0
    assert [turn["kind"] for turn in turns] == ["text", "speech"]


async def test_a_failed_turn_is_exit_code_1_with_the_reason(fake_server, short_wav, capsys):
    async with fake_server("fail") as server:
        code = await run(server, "--wav", short_wav, "--wav", short_wav, "--json")
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert code == 1
    assert summary["status"] == "failed"
    assert summary["error"] == "talker died"
    assert len(summary["turns"]) == 1, "the conversation stops at the first failure"
    assert "talker died" in captured.err


def test_an_unreachable_server_is_exit_code_1_and_still_json(short_wav, capsys):
    url = "ws://127.0.0.1:1/v1/realtime"
    code = main(["--url", url, "--wav", str(short_wav), "--json"])
    captured = capsys.readouterr()
    assert code == 1
    assert json.loads(captured.out)["status"] == "unreachable"
    assert "is the server running" in captured.err


@pytest.mark.parametrize("args", [["--wav", "missing.wav"], ["--text", " "], ["--url", "x"]])
def test_wrong_arguments_are_exit_code_2(args):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2


def test_the_bundled_recording_is_the_default_turn():
    [said] = parse_args([])[1].turns
    assert said.pcm == clip.load_pcm(clip.BUNDLED_CLIP)


def test_the_key_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("SGLANG_LIVE_API_KEY", "k-2")
    assert parse_args([])[0].api_key == "k-2"
    assert parse_args(["--api-key", "k-3"])[0].api_key == "k-3"
