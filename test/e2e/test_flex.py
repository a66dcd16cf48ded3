"""Flex requests on the whole server, with OpenAI's unmodified client."""

import time

import httpx
import openai
import pytest

from test.e2e.conftest import DATA, wait_until

pytestmark = [pytest.mark.e2e]

HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=60)


def test_written_and_spoken_requests_say_that_they_were_flex(client, server):
    # A drawn response may have no text.
    short = {"model": "demo", "max_tokens": 8, "temperature": 0, "service_tier": "flex"}
    chat = client.chat.completions.create(**short, messages=HI)
    assert chat.service_tier == "flex" and chat.choices[0].message.content
    chunks = list(client.chat.completions.create(**short, messages=HI, stream=True))
    assert len(chunks) > 1 and {chunk.service_tier for chunk in chunks} == {"flex"}
    body = short | {"prompt": ["Once", "Twice"]}
    done = httpx.post(f"{server.http}/v1/completions", json=body, timeout=60)
    assert done.status_code == 200 and done.json()["service_tier"] == "flex"
    assert all(choice["text"] for choice in done.json()["choices"])
    spoken = client.chat.completions.create(
        model="demo",
        messages=HI,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "wav"},
        temperature=0,
        service_tier="flex",
    )
    assert spoken.service_tier == "flex" and spoken.choices[0].message.audio.data
    with (DATA / "sp_librivox_0880.flac").open("rb") as file:
        heard = client.audio.transcriptions.with_raw_response.create(
            model="demo", file=file, extra_body={"service_tier": "flex"}
        )
    assert heard.headers["x-service-tier"] == "flex" and heard.parse().text
    server.wait_until_free()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(server, stream):
    body = {
        "text": "Once",
        "priority": -1,
        "stream": stream,
        "sampling_params": {"max_new_tokens": 2_000, "ignore_eos": True},
    }
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{server.http}/generate", json=body, timeout=httpx.Timeout(5, read=1.0)
        ) as response,
    ):
        until_s = time.monotonic() + 1.0
        for _ in response.iter_raw():
            if time.monotonic() > until_s:
                raise httpx.ReadTimeout("the client leaves")
    # Gauges come with a ping every two seconds; SGLang alone would notice after 4 s.
    load = ("requests_running", "kv_tokens_used")
    for what in load:
        wait_until(lambda w=what: server.stage_load("thinker", w) == 0, 5, what)
