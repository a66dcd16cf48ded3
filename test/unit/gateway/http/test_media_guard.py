"""The guard of the media that a proxied request names."""

import pytest

from sglang_live.gateway.http.media_guard import MediaConfig, MediaGuard, MediaRefusedError

ADDRESSES = {
    "media.example": ["93.184.216.34", "2606:2800:220:1::1"],
    "inside.example": ["10.0.0.7"],
    "half.example": ["93.184.216.34", "127.0.0.1"],
    "2130706433": ["127.0.0.1"],
    "0x7f.1": ["127.0.0.1"],
}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


async def resolve(host: str) -> list[str]:
    if host not in ADDRESSES:
        raise OSError("no such host")
    return ADDRESSES[host]


def chat(part: dict) -> dict:
    text = {"type": "text", "text": "see /etc/passwd and file:///etc/passwd"}
    return {"messages": [{"role": "user", "content": [text, part]}]}


def bodies(source: str) -> list[dict]:
    """A body for every field from which SGLang loads media."""
    return [
        chat({"type": "image_url", "image_url": {"url": source}}),
        chat({"type": "image_url", "image_url": source}),
        chat({"type": "video_url", "video_url": {"url": source, "fps": 2}}),
        chat({"type": "audio_url", "audio_url": {"url": source}}),
        {"text": "x", "image_data": source},
        {"text": "x", "image_data": [PICTURE, source]},
        {"text": ["x", "y"], "image_data": [[PICTURE], [source]]},
        {"text": "x", "image_data": {"url": source, "detail": "auto"}},
        {"text": "x", "audio_data": [source]},
        {"text": "x", "video_data": source},
    ]


async def refused(body, **config) -> bool:
    try:
        await MediaGuard(MediaConfig(**config), resolve).check(body)
    except MediaRefusedError:
        return True
    return False


@pytest.mark.parametrize(
    "source",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        " file:///etc/passwd",
        "/etc/passwd",
        "../secret.png",
        "secret.wav",
        "ftp://media.example/a.wav",
        "http://127.0.0.1/a.png",
        "http://localhost.localdomain./a.png",
        "http://[::1]/a.png",
        "http://[::ffff:10.0.0.1]/a.png",
        "http://169.254.169.254/latest/meta-data",
        "http://0.0.0.0/a",
        "https://inside.example/a.png",
        "https://half.example/a.png",
        "http://2130706433/a.png",
        "http://0x7f.1/a.png",
        "http://media.example\\@127.0.0.1/a.png",
        "http://media.example@127.0.0.1/a.png",
        "http://user:pw@media.example/a.png",
        "http:///a.png",
        "http://[broken/a.png",
        "http://unknown.example/a.png",
        "http://media.example/a\n.png",
    ],
)
async def test_local_and_private_media_are_refused_in_every_field(source):
    for body in bodies(source):
        assert await refused(body), body


@pytest.mark.parametrize("source", [PICTURE, "https://media.example/a.png"])
async def test_inline_and_public_media_pass(source):
    for body in bodies(source):
        assert not await refused(body), body


async def test_descriptions_of_media_are_not_media():
    bodies = [
        {"text": "file:///etc/passwd"},
        chat({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}),
        {"messages": [{"role": "user", "content": "file:///etc/passwd"}]},
        {"messages": "not a list"},
        {"messages": [7, {"content": [7, None]}]},
        {"image_data": [None, [], {}]},
        [],
        7,
    ]
    for body in bodies:
        assert not await refused(body), body


async def test_bare_base64_passes_only_if_it_cannot_be_a_path():
    assert not await refused({"image_data": "iVBORw0KGgo="})
    assert await refused({"image_data": "/9j/4AAQSkZJRg=="})  # SGLang would open this
    assert await refused({"audio_data": "iVBORw0KGgo="})


async def test_the_operator_can_allow_each_kind():
    for body in bodies("/data/clip.wav"):
        assert not await refused(body, allow_local_media=True)
    for body in bodies("http://127.0.0.1/clip.wav"):
        assert await refused(body, allow_local_media=True)
        assert not await refused(body, allow_private_media_urls=True)


async def test_a_request_with_too_many_media_is_refused():
    assert await refused({"image_data": [PICTURE] * 300})
