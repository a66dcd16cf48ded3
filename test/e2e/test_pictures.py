"""Pictures over the realtime socket and in spoken chat, with a model that has a vision tower."""

import base64

import httpx
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from test.e2e.socket_client import NO_VAD, clip_24k, connected, is_whole
from test.pictures import file_of, noise, uri_of
from test.videos import film, grey, video_uri

pytestmark = [pytest.mark.e2e]

WORDS = {"type": "input_text", "text": "what is to be seen"}


def message(*content: dict) -> dict:
    return {"type": "message", "role": "user", "content": list(content)}


def picture(url: str, **fields) -> dict:
    return {"type": "input_image", "image_url": url, **fields}


async def test_a_picture_gets_a_spoken_response_and_stays_in_the_conversation(server):
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        look = message(WORDS, picture(uri_of(noise(160, 96))))
        await socket.send("conversation.item.create", item=look)
        await socket.send("response.create")
        done = await socket.until("response.done")
        assert is_whole(done), done
        assert len(socket.audio()) > 2_400
        used = done["response"]["usage"]["input_token_details"]
        assert used["image_tokens"] == 5 * 3
        # Beside speech, and behind what was said.
        more = message(picture(uri_of(Image.new("RGB", (640, 480), "teal"), "JPEG"), detail="low"))
        await socket.send("conversation.item.create", item=more)
        done = await socket.say(clip_24k("sp_jfk.flac", 2.0))
        assert is_whole(done), done
        used = done["response"]["usage"]["input_token_details"]
        assert used["image_tokens"] > 200 and used["audio_tokens"] > 20
    server.wait_until_free()


GIF = f"data:image/gif;base64,{base64.b64encode(file_of(noise(8, 8), 'GIF')).decode()}"
BOMB = base64.b64encode(file_of(Image.new("1", (20_000, 20_000)))).decode()


async def test_bad_pictures_are_refused_and_the_call_goes_on(server):
    bad = {
        "https://example.com/a.png": "fetches no pictures",
        GIF: "image/gif",
        GIF.replace("gif", "png", 1): "GIF",
        "data:image/png;base64,not base64!": "not base64",
        "data:image/png;base64,AAAA": "no picture",
        f"data:image/png;base64,{BOMB}": "20000 x 20000 pixels",
    }
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        for url, why in bad.items():
            await socket.send("conversation.item.create", item=message(picture(url)))
            error = (await socket.until("error"))["error"]
            assert why in error["message"] and error["param"] == "item.content[0].image_url"
        assert is_whole(await socket.ask("are you there"))


def test_a_picture_in_spoken_chat(server):
    parts = [
        {"type": "text", "text": WORDS["text"]},
        {"type": "image_url", "image_url": {"url": uri_of(noise(160, 96))}},
    ]
    body = {
        "messages": [{"role": "user", "content": parts}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "ethan", "format": "wav"},
        "temperature": 0,  # a drawn response may have no text
    }
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["audio"]["transcript"]
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 5 * 3
    # Two layers of two frames, of at least 128 tokens each.
    video = video_uri(film(grey(20, 512, 288), codec="libx264"))
    parts[1] = {"type": "video_url", "video_url": {"url": video}}
    answer = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["audio"]["transcript"]
    assert answer["usage"]["prompt_tokens_details"]["video_tokens"] == 2 * 16 * 9
    parts[1] = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    refused = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=60)
    assert refused.status_code == 400 and "no video" in refused.json()["error"]["message"]


def test_a_video_as_qwens_clients_send_it(server):
    """A list of pictures, a stream that is called wav, and OpenAI's SDK."""
    client = OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)
    pages = [uri_of(Image.fromarray(frame), "JPEG") for frame in grey(4, 512, 288)]

    def asked(video: list[str], **fields):
        parts = [{"type": "video", "video": video, **fields}, {"type": "text", "text": "And now?"}]
        return client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": parts}],
            modalities=["text", "audio"],
            audio={"voice": "ethan", "format": "wav"},
            stream=True,
            stream_options={"include_usage": True},
        )

    # Of two pictures a second each pair is a layer of tokens, of one a second each picture.
    for video, fields, n_layers in ((pages, {}, 2), (pages, {"fps": 1}, 4), (pages[:1], {}, 1)):
        chunks = [*asked(video, **fields)]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        speech = "".join(delta.audio["data"] for delta in deltas if getattr(delta, "audio", None))
        assert len(base64.b64decode(speech)) > 2_400
        used = chunks[-1].usage.prompt_tokens_details
        assert used.video_tokens == n_layers * 16 * 9
    with pytest.raises(BadRequestError, match="Picture 1 has another size") as refused:
        asked([pages[0], uri_of(noise(64, 64))])
    assert refused.value.param == "messages[0].content[0].video"
