"""SGLang frontend programs against the gateway, through SGLang's interpreter."""

import asyncio
import json
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager

import numpy as np
import pytest
import sglang as sgl
import soundfile as sf
from httpx import TransportError
from openai import APIError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from sglang_live.core import AudioPart
from sglang_live.errors import StageFailedError
from sglang_live.lang import LiveEndpoint, listen, sound_iter, sound_of, speak
from test.unit.gateway.fakes import FakeOrchestrator, app_of, spoken, tone
from test.unit.gateway.live_server import listening

_PATIENCE_S = 10.0


class Writer:
    """SGLang's chat route as far as a program's `sgl.gen` needs it; records its requests."""

    def __init__(self):
        self.requests: list[dict] = []
        routes = [Route("/v1/chat/completions", self.chat, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def chat(self, request: Request) -> StreamingResponse:
        self.requests.append(json.loads(await request.body()))
        chunk = {"choices": [{"index": 0, "delta": {"content": "Rain."}, "finish_reason": "stop"}]}
        events = iter([f"data: {json.dumps(chunk)}\n\n", "data: [DONE]\n\n"])
        return StreamingResponse(events, media_type="text/event-stream")


@contextmanager
def serving(orchestrator: FakeOrchestrator, writer: Writer | None = None):
    """The gateway in a thread, because programs block: its address and its loop."""
    began: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with AsyncExitStack() as servers:
            url = None
            if writer is not None:
                url = f"http://{await servers.enter_async_context(listening(writer.app))}/"
            app = app_of(orchestrator, native_url=url)
            address = await servers.enter_async_context(listening(app))
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


def test_sound_arrives_while_it_is_generated():
    gate = asyncio.Event()
    script = spoken("It rains.", 400)
    orchestrator = FakeOrchestrator([[*script[:4], gate, *script[4:]], spoken("Still.", 80)])
    with serving(orchestrator) as (url, loop):
        state = ask.run(clip=np.zeros(8000, np.int16), backend=LiveEndpoint(url), stream=True)
        chunks = sound_iter(state, "answer")
        begun = next(chunks)
        assert not gate.is_set()
        loop.call_soon_threadsafe(gate.set)
        rest = list(chunks)
        assert np.concatenate([begun, *rest]).tobytes() == tone(80) * 5
        # Not text_iter: SGLang's may end before it has read a text that comes at once.
        assert state["more"] == "Still."


@pytest.mark.parametrize(
    ("stop", "sent"), [("END", ["END"]), (["END", "."], ["END", "."]), (None, None)]
)
def test_all_stop_texts_are_sent(stop, sent):
    @sgl.function
    def write(s):
        s += sgl.user("How is it?")
        s += sgl.assistant(sgl.gen("answer", stop=stop))

    writer = Writer()
    with serving(FakeOrchestrator(), writer) as (url, _):
        assert write.run(backend=LiveEndpoint(url))["answer"] == "Rain."
    assert writer.requests[0].get("stop") == sent


def test_all_settings_of_a_program_are_sent():
    @sgl.function
    def write(s):
        s += sgl.user("How is it?")
        s += sgl.assistant(
            sgl.gen("answer", min_tokens=2, ignore_eos=True, top_k=5, min_p=0.1, stop_token_ids=[7])
        )
        s += sgl.user("Well?")
        s += sgl.assistant(sgl.gen("word", regex="[a-z]+"))
        s += sgl.user("And now?")
        s += sgl.assistant(sgl.gen("more", json_schema='{"type": "string"}'))

    writer = Writer()
    with serving(FakeOrchestrator(), writer) as (url, _):
        assert write.run(backend=LiveEndpoint(url))["more"]  # the program runs until it is read
    first, second, third = writer.requests
    wanted = {"min_tokens": 2, "ignore_eos": True, "top_k": 5, "min_p": 0.1}
    assert wanted.items() <= first.items()
    assert first["stop_token_ids"] == [7]
    assert second["regex"] == "[a-z]+" and "min_tokens" not in second
    assert third["response_format"]["json_schema"]["schema"] == {"type": "string"}


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_settings_that_have_no_effect_are_refused():
    @sgl.function
    def write(s):
        s += sgl.user("How is it?")
        s += sgl.assistant(sgl.gen("answer", return_logprob=True, n=2))

    writer = Writer()
    with serving(FakeOrchestrator(), writer) as (url, _):
        state = write.run(backend=LiveEndpoint(url))
        assert str(state.error()) == "n, return_logprob: not supported"
    assert not writer.requests


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
@pytest.mark.parametrize("answer", [sgl.gen("answer"), speak("answer")], ids=["gen", "speak"])
def test_a_response_that_begins_with_text_of_the_program_is_refused(answer):
    @sgl.function
    def prompt(s):
        s += sgl.user("How is it?")
        s += sgl.assistant("Well, " + answer)

    with serving(FakeOrchestrator()) as (url, _):
        state = prompt.run(backend=LiveEndpoint(url))
        with pytest.raises(ValueError, match="first within"):
            raise state.error()


def test_a_name_without_speech_is_an_error():
    with serving(FakeOrchestrator([spoken("It rains."), spoken("Still.")])) as (url, _):
        state = ask.run(clip=np.zeros(8000, np.int16), backend=LiveEndpoint(url), stream=True)
        with pytest.raises(KeyError, match="answr"):
            list(sound_iter(state, "answr"))
        assert len(list(sound_iter(state, "answer"))) == 5
        assert list(sound_iter(state, "answer")) == []


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_the_error_of_the_program_ends_all_its_sounds():
    """The first response breaks off; the second does not begin."""
    broken = [*spoken("It rains.", 400)[:4], StageFailedError("the vocoder has died")]
    with serving(FakeOrchestrator([broken])) as (url, _):
        state = ask.run(clip=np.zeros(8000, np.int16), backend=LiveEndpoint(url), stream=True)
        chunks = sound_iter(state, "answer")
        assert next(chunks).tobytes() == tone(80)
        for rest in (chunks, sound_iter(state, "more")):
            with pytest.raises((APIError, TransportError)) as raised:
                list(rest)
            assert raised.value is state.error()


@pytest.mark.filterwarnings("ignore:Error in stream_executor")
def test_an_image_is_refused_and_the_error_reaches_the_sound():
    @sgl.function
    def look(s):
        s += sgl.user("Look: " + sgl.image(b"no sound at all"))
        s += sgl.assistant(speak("answer"))

    with serving(FakeOrchestrator()) as (url, _):
        state = look.run(backend=LiveEndpoint(url), stream=True)
        with pytest.raises(ValueError, match="pictures"):
            list(sound_iter(state, "answer"))


def test_speech_refuses_settings_that_it_does_not_support():
    with pytest.raises(TypeError, match="stop"):
        speak("answer", stop="END")


def test_an_input_that_is_no_sound_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rate_hz"):
        listen(np.zeros(10))
    with pytest.raises(ValueError, match="none"):
        listen(tmp_path / "none.wav")
    path = tmp_path / "speech.wav"
    sf.write(path, np.zeros(800), 8000)
    assert listen(path).path[8:12] == b"WAVE"
