"""A session on a simulated clock, with responses of known tokens and frames."""

from contextlib import asynccontextmanager

from sglang_live.clock import SimClock
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    connected,
    done,
    history_item_of,
    services,
    voice,
)

WORDS = "one two three four five six seven eight nine ten"
DELTA = "response.output_audio.delta"
STARTED = "input_audio_buffer.speech_started"
TRUNCATED = "conversation.item.truncated"
# Long enough to be suspected (96 ms), too short to be confirmed (250 ms).
COUGH = voice(200)
VOICE = voice(500)
SILENCE_300MS = bytes(14_400)
SILENCE_1S = bytes(48_000)


def interrupted_end(words: str = WORDS, **fields):
    fields = {"n_frames": 20, "spoken": False, **fields}
    return done(status="interrupted", item=history_item_of(words), **fields)


class World:
    def __init__(self, *scripts, **config):
        self.clock = SimClock(50.0)
        self.orchestrator = FakeOrchestrator([*scripts])
        self.shared = services(self.orchestrator, self.clock, **config)

    @property
    def session(self):
        return self.orchestrator.session

    @asynccontextmanager
    async def connect(self):
        async with connected(self.orchestrator, self.shared) as client:
            self.session.on_interrupt = [interrupted_end()]
            yield client

    async def play(self, client, seconds: float) -> None:
        await client.settle()
        self.clock.advance(seconds)
        await client.settle()

    def value(self, name, **labels):
        name = f"sglang_live_gateway_{name}"
        return self.shared.metrics.registry.get_sample_value(name, labels)


async def start(client) -> str:
    """Create a response; return its item id when the script has been sent up to its gate."""
    client.send("response.create")
    item_id = (await client.find("response.output_item.added"))["item"]["id"]
    await client.settle()
    return item_id


async def next_history(world, client):
    client.append(SILENCE_1S)
    await client.until("response.done")
    return world.orchestrator.turns[-1].history
