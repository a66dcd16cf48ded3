"""SGLang frontend programs against the gateway, through the interpreter as it is."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import sglang as sgl
import soundfile as sf

from sglang_live.lang import LiveEndpoint, listen, sound_iter, sound_of, speak
from sglang_live.orchestrator.history import AudioPart

from .fakes import FakeOrchestrator, app_of, spoken, tone
from .live_server import listening

_PATIENCE_S = 10.0


@contextmanager
def serving(orchestrator: FakeOrchestrator):
    """The gateway in a thread of its own, for programs block: its address and its loop."""
    began: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with listening(app_of(orchestrator)) as address:
            stop = asyncio.Event()
            began.set_result((address, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stop = began.result(_PATIENCE_S)
    try:
        yield f"http://{address}", loop
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_PATIENCE_S)
        assert not thread.is_alive()


@sgl.function
def ask(s, clip):
    s += sgl.system("Be brief.")
    s += sgl.user("Listen: " + listen(clip, 8000))
    s += sgl.assistant(speak("answer", voice="bob", max_new_tokens=40))
    s += sgl.user("And now?")
    s += sgl.assistant(speak("more"))


def test_a_program_listens_and_speaks():
    orchestrator = FakeOrchestrator([spoken("It rains.", 400), spoken("Still.", 160)])
    with serving(orchestrator) as (url, _):
        state = ask.run(clip=np.zeros(8000, np.int16), backend=LiveEndpoint(url))
        assert (state["answer"], state["more"]) == ("It rains.", "Still.")
        assert sound_of(state, "answer").tobytes() == tone(80) * 5
        assert sound_of(state, "more").tobytes() == tone(80) * 2
        first, second = (session.turns[0] for session in orchestrator.sessions)
    assert (first.instructions, first.voice, first.max_output_tokens) == ("Be brief.", "bob", 40)
    text, audio = first.history[0].parts
    assert text.text == "Listen: "
    assert isinstance(audio, AudioPart) and audio.duration_s == pytest.approx(1.0)
    assert [item.role for item in second.history] == ["user", "assistant", "user"]
    assert second.history[1].parts[0].text == "It rains."


def test_sound_comes_while_it_is_made():
    gate = asyncio.Event()
    script = spoken("It rains.", 400)
    orchestrator = FakeOrchestrator([[*script[:4], gate, *script[4:]], spoken("Still.", 80)])
    with serving(orchestrator) as (url, loop):
        state = ask.run(clip=np.zeros(8000, np.int16), backend=LiveEndpoint(url), stream=True)
        pieces = sound_iter(state, "answer")
        begun = next(pieces)
        assert not gate.is_set()
        loop.call_soon_threadsafe(gate.set)
        rest = list(pieces)
        assert np.concatenate([begun, *rest]).tobytes() == tone(80) * 5
        assert "".join(state.text_iter("more")) == "Still."


def test_what_is_no_sound_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rate_hz"):
        listen(np.zeros(10))
    with pytest.raises(ValueError, match="none"):
        listen(tmp_path / "none.wav")
    path = tmp_path / "said.wav"
    sf.write(path, np.zeros(800), 8000)
    assert listen(path).path[8:12] == b"WAVE"
