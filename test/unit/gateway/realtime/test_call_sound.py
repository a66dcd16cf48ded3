"""The sound of a call's responses and the process that sends it, without the process."""

import asyncio

from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.webrtc.sound import CallSound
from sglang_live.webrtc.messages import PACKET_BYTES, Discard, Hold, Left, Play, PlayedOut
from sglang_live.webrtc.send import SendPath


class Line:
    """A MediaLine, whose packets leave by tick()."""

    def __init__(self):
        self.id = "rtc_1"
        self.received = asyncio.Queue()
        self.on_left = None
        self.path = SendPath()

    def tell(self, message) -> None:
        match message:
            case Play():
                self.path.play(message.lane, message.pcm)
            case PlayedOut():
                self.path.played_out(message.lane)
            case Hold():
                self.path.hold(message.lane, held=message.held)
            case Discard():
                self.path.discard(message.lane)

    def tick(self, n: int = 1) -> None:
        for _ in range(n):
            _, lane, n_bytes = self.path.tick()
            if n_bytes:
                self.on_left(Left(self.id, lane, n_bytes))


class World:
    def __init__(self):
        self.line, self.told = Line(), []
        emit = lambda kind, **fields: self.told.append((kind.partition(".")[2], *fields.values()))  # noqa: E731
        self.sound = CallSound(self.line, Outbox(lambda frame: None, 1 << 20), emit)
        self.line.on_left = self.sound.left

    def respond(self, lane: str, n: int = 2) -> None:
        self.sound.play(lane, bytes(n * PACKET_BYTES), lambda pcm: None)
        self.sound.all_played(lane)
        self.sound.response_done(lane)


async def test_a_voice_that_is_suspected_as_a_response_ends_holds_no_later_one():
    world = World()
    world.respond("a")
    world.line.tick(4)
    world.sound.hold("a")
    world.line.tick(3)
    world.sound.release("a")
    world.respond("b")
    world.line.tick(2)
    assert world.told == [("started", "a"), ("stopped", "a"), ("started", "b"), ("stopped", "b")]


async def test_a_response_without_audio_that_is_held_holds_no_later_one():
    world = World()
    world.sound.hold("a")
    world.sound.response_done("a")
    world.sound.release("a")
    world.respond("b")
    world.line.tick(2)
    assert world.told == [("started", "b"), ("stopped", "b")]


async def test_audio_of_a_held_response_waits_for_its_release_or_is_dropped():
    world = World()
    world.sound.hold("a")
    world.respond("a", 3)
    world.line.tick(5)
    assert world.told == []
    world.sound.release("a")
    world.line.tick(1)
    assert world.sound.discard_audio("a") == 0.04
    world.respond("b", 1)
    world.line.tick(1)
    assert world.told == [("started", "a"), ("cleared", "a"), ("started", "b"), ("stopped", "b")]
