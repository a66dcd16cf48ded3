"""Pictures in a conversation: what the model and the client get of them, and what is refused."""

import base64
import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from sglang_live.core import ImagePart, TextPart, Usage
from sglang_live.sound import media
from test.pictures import file_of, noise, uri_of
from test.unit.gateway.fakes import FakeOrchestrator, connected, done

URI = uri_of(noise(64, 32))


@pytest.fixture(scope="module", autouse=True)
def decoder() -> Iterator[None]:
    yield
    media.close()


def picture(url=URI, **fields) -> dict:
    return {"type": "input_image", "image_url": url, **fields}


def message(*content: dict) -> dict:
    return {"type": "message", "role": "user", "content": list(content)}


def pixels(part: ImagePart) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(part.png)))


async def test_a_picture_reaches_the_model_and_its_tokens_are_counted():
    usage = Usage(input_text_tokens=5, input_image_tokens=8, output_text_tokens=1)
    orchestrator = FakeOrchestrator([[done("a lamp", usage=usage)]])
    async with connected(orchestrator, sees=True) as client:
        words = {"type": "input_text", "text": "What is it?"}
        client.send("conversation.item.create", item=message(words, picture(detail="high")))
        added = await client.find("conversation.item.added")
        assert added["item"]["content"] == [words, {"type": "input_image", "detail": "high"}]
        client.send("response.create", response={"output_modalities": ["text"]})
        end = await client.find("response.done")
        [item] = orchestrator.turns[-1].history
        assert item.parts[0] == TextPart("What is it?")
        assert (pixels(item.parts[1]) == np.asarray(noise(64, 32))).all()
        used = end["response"]["usage"]
        assert used["input_tokens"] == 13
        assert used["input_token_details"]["image_tokens"] == 8


async def test_a_picture_is_retrieved():
    async with connected(FakeOrchestrator(), sees=True) as client:
        client.send("conversation.item.create", item=message(picture()) | {"id": "look"})
        client.send("conversation.item.retrieve", item_id="look")
        [part] = (await client.find("conversation.item.retrieved"))["item"]["content"]
        data = base64.b64decode(part["image_url"].removeprefix("data:image/png;base64,"))
        assert (np.asarray(Image.open(io.BytesIO(data))) == np.asarray(noise(64, 32))).all()


async def test_a_picture_of_low_detail_is_scaled_down():
    orchestrator = FakeOrchestrator([[done("x")]])
    async with connected(orchestrator, sees=True) as client:
        uri = uri_of(Image.new("RGB", (1024, 1024), "teal"), "JPEG")
        response = {"output_modalities": ["text"], "input": [message(picture(uri, detail="low"))]}
        client.send("response.create", response=response)
        await client.find("response.done")
        [item] = orchestrator.turns[-1].history
        assert (item.parts[0].width, item.parts[0].height) == (512, 512)


GIF = base64.b64encode(file_of(noise(8, 8), "GIF")).decode()
WIDE = base64.b64encode(file_of(Image.new("1", (30_000, 2)))).decode()


@pytest.mark.parametrize(
    ("part", "code", "at", "why"),
    [
        (picture("https://example.com/a.png"), "invalid_value", "image_url", "fetches no"),
        (picture("file:///etc/passwd"), "invalid_value", "image_url", "data URI"),
        (picture("data:image/gif;base64," + GIF), "invalid_value", "image_url", "image/gif"),
        (picture("data:image/png;base64," + GIF), "invalid_picture", "image_url", "GIF"),
        (picture("data:image/png;base64,AAA%"), "invalid_value", "image_url", "base64"),
        (picture("data:image/png;base64,AAAA"), "invalid_picture", "image_url", "no picture"),
        (picture(URI[:222]), "invalid_picture", "image_url", "cannot be read"),
        (picture("data:image/png;base64," + WIDE), "invalid_picture", "image_url", "100 times"),
        (picture(""), "invalid_value", "image_url", "data URI"),
        (picture(None), "missing_required_parameter", "image_url", "image_url"),
        (picture(detail="best"), "invalid_value", "detail", "best"),
    ],
)
async def test_a_bad_picture_is_refused_by_name(part, code, at, why):
    async with connected(FakeOrchestrator(), sees=True) as client:
        client.send("conversation.item.create", item=message(part))
        error = (await client.find("error"))["error"]
        assert (error["code"], error["param"]) == (code, f"item.content[0].{at}")
        assert why in error["message"]
        client.send("conversation.item.create", item=message(picture()))
        await client.find("conversation.item.done")


async def test_a_model_without_a_vision_tower_refuses_pictures_by_name():
    async with connected(FakeOrchestrator()) as client:
        client.send("conversation.item.create", item=message(picture()))
        error = (await client.find("error"))["error"]
        assert error["code"] == "unsupported_content_type"
        assert "This model sees no pictures." in error["message"]


async def test_a_message_has_a_bounded_number_of_pictures():
    async with connected(FakeOrchestrator(), sees=True) as client:
        client.send("conversation.item.create", item=message(*17 * [picture()]))
        assert "17 pictures" in (await client.find("error"))["error"]["message"]


async def test_pictures_count_as_part_of_the_context():
    orchestrator = FakeOrchestrator(most_tokens=100)
    async with connected(orchestrator, sees=True) as client:
        client.send("conversation.item.create", item=message(picture()))
        await client.find("conversation.item.done")
        [content] = orchestrator.measured
        assert (content.picture_tokens, len(content.pictures)) == (2, 1)
        assert content.most_tokens >= 2
