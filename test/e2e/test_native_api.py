"""SGLang's own API beside the realtime one, and programs written for it."""

import asyncio
import base64
import io

import httpx
import pytest
import soundfile as sf

from test.e2e.conftest import DATA, wait_until

pytestmark = [pytest.mark.e2e]


def wav_base64(seconds: float) -> str:
    pcm, rate_hz = sf.read(DATA / "sp_jfk.flac", dtype="int16")
    out = io.BytesIO()
    sf.write(out, pcm[: int(rate_hz * seconds)], rate_hz, format="WAV")
    return base64.b64encode(out.getvalue()).decode()


def test_chat_completions_accept_audio(server):
    audio = {"type": "input_audio", "input_audio": {"data": wav_base64(2.0), "format": "wav"}}
    content = [{"type": "text", "text": "what is said"}, audio]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
    }
    heard = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    body["messages"] = [{"role": "user", "content": "what is said"}]
    deaf = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    assert heard["choices"][0]["message"]["content"]
    assert heard["usage"]["prompt_tokens"] - deaf["usage"]["prompt_tokens"] >= 26


def test_audio_without_a_placeholder_in_the_prompt_is_refused(server):
    body = {
        "text": "there is no placeholder in here",
        "audio_data": [f"data:audio/wav;base64,{wav_base64(1.0)}"],
        "sampling_params": {"max_new_tokens": 4},
    }
    answer = httpx.post(f"{server.http}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "0 of 1 audio clips" in answer.text


def test_a_prompt_may_begin_and_end_with_audio(server):
    body = {
        "text": "<|audio_pad|>",
        "audio_data": [f"data:audio/wav;base64,{wav_base64(1.0)}"],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    }
    answer = httpx.post(f"{server.http}/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["prompt_tokens"] == 13


def test_a_frontend_program_runs_unchanged(server):
    import sglang as sgl

    backend = sgl.RuntimeEndpoint(server.http)

    @sgl.function
    def two_questions(s, first):
        s += sgl.user(first)
        s += sgl.assistant(sgl.gen("one", max_tokens=6, temperature=0))
        s += sgl.user("and then")
        s += sgl.assistant(sgl.gen("two", max_tokens=6, temperature=0))

    state = two_questions.run(first="hello", backend=backend)
    assert state["one"]
    assert state["two"]
    streamed = two_questions.run(first="hello", backend=backend, stream=True)
    assert sum(1 for _ in streamed.text_iter()) > 2


async def test_a_third_turn_is_refused_beside_a_running_one(server):
    """Stock SGLang 0.5.23 admits it, mixes both contexts, and its pool check then exits."""
    async with httpx.AsyncClient(base_url=server.http, timeout=60) as http:
        request = {"capacity_of_str_len": 1 << 20, "streaming": True}
        session = (await http.post("/open_session", json=request)).json()

        async def turn(first_id: int, n_tokens: int) -> httpx.Response:
            sampling = {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
            body = {
                "input_ids": list(range(first_id, first_id + 20)),
                "sampling_params": sampling,
                "session_params": {"id": session},
            }
            return await http.post("/generate", json=body)

        assert (await turn(100, 4)).status_code == 200
        running = asyncio.create_task(turn(200, 300))
        await asyncio.sleep(0.2)
        assert (await turn(300, 4)).status_code == 400
        assert (await turn(400, 4)).status_code == 400
        assert (await running).status_code == 200
        last = (await turn(500, 4)).json()["meta_info"]
        # 20 + 4, 20 + 300, 20: the refused turns left no tokens.
        assert last["prompt_tokens"] == 364
        await http.post("/close_session", json={"session_id": session})
    wait_until(lambda: server.stage_load("thinker", "kv_tokens_used") == 0, 10, "pool free")
    assert server.is_healthy()


async def talk(http: httpx.AsyncClient, session: str, n_turns: int) -> list[dict]:
    """Run turns of 20 tokens with responses of 16. Returns the meta_info of each."""
    metas = []
    for n in range(n_turns):
        body = {
            "input_ids": list(range(100 + 20 * n, 120 + 20 * n)),
            "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True},
            "session_params": {"id": session},
        }
        answer = await http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        metas.append(answer.json()["meta_info"])
    return metas


async def test_a_session_keeps_the_window_of_its_open_request(server):
    n_dropped = server.stage_load("thinker", "policy_tokens_compacted")
    request = {"capacity_of_str_len": 1 << 20, "streaming": True}
    async with httpx.AsyncClient(base_url=server.http, timeout=60) as http:
        bound = {"window": 64, "sink": 8, "slack": 16}
        session = (await http.post("/open_session", json=request | {"retention": bound})).json()
        metas = await talk(http, session, n_turns=12)
        assert max(meta["prompt_tokens"] for meta in metas) <= 8 + 64 + 16 + 20
        assert all(meta["cached_tokens"] >= 64 for meta in metas[4:])
        await http.post("/close_session", json={"session_id": session})
    wait_until(
        lambda: server.stage_load("thinker", "policy_tokens_compacted") >= n_dropped + 300,
        10,
        "cuts",
    )
    wait_until(lambda: server.stage_load("thinker", "kv_tokens_used") == 0, 10, "pool free")


async def test_a_window_ends_with_its_session_even_if_the_id_is_reused(server):
    request = {"capacity_of_str_len": 1 << 20, "streaming": True, "session_id": "again"}
    async with httpx.AsyncClient(base_url=server.http, timeout=60) as http:
        for retention, is_bounded in (
            ({"retention": {"window": 64, "slack": 16}}, True),
            ({}, False),
        ):
            answer = await http.post("/open_session", json=request | retention)
            assert answer.json() == "again"
            metas = await talk(http, "again", n_turns=6)
            assert (metas[-1]["prompt_tokens"] < 5 * 36 + 20) == is_bounded
            await http.post("/close_session", json={"session_id": "again"})


async def test_an_invalid_window_opens_no_session(server):
    request = {"capacity_of_str_len": 1 << 20, "streaming": True, "retention": {"window": 0}}
    answer = httpx.post(f"{server.http}/open_session", json=request, timeout=60)
    assert answer.status_code == 400
    assert "window" in answer.json()["error"]["message"]


async def test_the_request_of_a_disconnected_streaming_client_stops(server):
    """Upstream such requests decode to their end, or the engine exits."""
    body = {
        "input_ids": list(range(600, 640)),
        "stream": True,
        "sampling_params": {"max_new_tokens": 20_000, "temperature": 0, "ignore_eos": True},
    }
    async with (
        httpx.AsyncClient(base_url=server.http, timeout=60) as http,
        http.stream("POST", "/generate", json=body) as response,
    ):
        await anext(response.aiter_lines())
    wait_until(lambda: server.stage_load("thinker", "requests_running") == 0, 10, "aborted")
    assert server.is_healthy()
