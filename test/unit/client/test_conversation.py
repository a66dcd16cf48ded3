import pytest

from sglang_live.client import clip
from sglang_live.client.connection import SessionOptions
from sglang_live.client.conversation import Conversation
from test.unit.client.claims import ClientClaims


class TestConversation(ClientClaims):
    client = Conversation
    options = SessionOptions


opened = TestConversation().opened


def test_the_url_names_the_model():
    named = SessionOptions(url="ws://host/v1/realtime?a=1", model="cascade").full_url()
    assert named.endswith("/v1/realtime?model=cascade&a=1")


async def test_the_key_travels_in_the_header_only(fake_server, fast_clock):
    async with (
        fake_server() as server,
        opened(server, fast_clock, api_key="k-1"),
    ):
        pass
    assert server.headers[0]["authorization"] == "Bearer k-1"
    assert "k-1" not in server.paths[0]


@pytest.mark.parametrize("url", ["http://host/v1/realtime", "ws://", "nonsense"])
def test_a_wrong_url_is_refused_before_connecting(url):
    with pytest.raises(ValueError, match="url must look like"):
        SessionOptions(url=url)


async def test_speech_stops_the_response_and_the_server_gets_what_was_heard(
    fake_server, stream_clock, speech
):
    # The server takes the pause for the end of the turn.
    clip_with_pause = speech + bytes(50 * clip.FRAME_BYTES) + speech
    async with (
        fake_server("stream") as server,
        opened(server, stream_clock) as conversation,
    ):
        turn = await conversation.speak(clip_with_pause)
    [truncation] = [e for e in server.received if e["type"] == "conversation.item.truncate"]
    assert truncation["item_id"] == "item_1"
    assert 0 < truncation["audio_end_ms"] < 2000
    assert turn.ok
    assert turn.response_id == "resp_2"
    assert turn.audio_s == pytest.approx(2.0)


async def test_a_refused_truncation_does_not_fail_the_turn(fake_server, stream_clock, speech):
    clip_with_pause = speech + bytes(50 * clip.FRAME_BYTES) + speech
    async with (
        fake_server("strict") as server,
        opened(server, stream_clock) as conversation,
    ):
        turn = await conversation.speak(clip_with_pause)
    assert "conversation.item.truncate" in server.types()
    assert turn.ok
