"""A voice unlike the user's over a response, or in a turn of its own, through the real detector."""

import asyncio
import threading

import numpy as np
import pytest

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.interaction.filters.other_voices import SpeakerThread
from sglang_live.interaction.scoring import SpeechScorer
from sglang_live.interaction.silero import SileroModel
from test.unit.gateway.fakes import FakeOrchestrator, connected, spoken, types

from .playback_world import STARTED, World
from .test_voice_over_response import (
    IGNORED,
    OTHER,
    SUSPECTED,
    USER,
    decisions,
    heard_over_a_response,
    long_response,
    pcm16,
)

# On a busy machine the thread may begin late.
PATIENCE_S = 10.0
SELF, ANOTHER = np.float32([1, 0]), np.float32([0.3, 0.954])


class FakeSpeakerModel:
    """Embeds each sound as the person who speaks now."""

    def __init__(self) -> None:
        self.speaks = SELF
        self.fails = False
        self.waits_for: threading.Event | None = None
        self.n_calls = 0

    def embed(self, sounds, lengths=()):
        self.n_calls += 1
        if self.waits_for is not None:
            assert self.waits_for.wait(10)
        if self.fails:
            raise RuntimeError("the network failed")
        return np.tile(self.speaks, (max(len(lengths), 1), len(sounds), 1))


@pytest.fixture
def model():
    return FakeSpeakerModel()


@pytest.fixture
def world(model):
    made = World(long_response(), spoken("Yes?"), knows_voices=True)
    made.shared.scorer = SpeechScorer(SileroModel())
    made.shared.speaker_thread = SpeakerThread(model, PATIENCE_S)
    yield made
    made.shared.close()


async def heard(world, model, client, *sounds: np.ndarray, by=ANOTHER) -> list[str]:
    """Of what comes over the response to the user's first turn."""
    await heard_over_a_response(world, client)
    await learnt(world)
    model.speaks = by
    return await over(world, client, *sounds)


async def learnt(world, n: int = 1, outcome: str = "learnt") -> None:
    async with asyncio.timeout(30):
        while (world.value("voices_learnt_total", outcome=outcome) or 0) < n:
            await asyncio.sleep(0.005)


async def over(world, client, *sounds: np.ndarray) -> list[str]:
    events = []
    for samples in sounds:
        for part in np.array_split(samples, max(1, len(samples) // (OUTPUT_RATE_HZ // 10))):
            world.clock.advance(len(part) / OUTPUT_RATE_HZ)
            client.append(pcm16(part))
            events += types(await quiet(client))
    return events


async def quiet(client) -> list[dict]:
    """All events; a comparison in its thread takes real time."""
    events = await client.settle()
    await asyncio.sleep(0.01)
    return events + await client.settle()


def comparisons(world, outcome: str) -> float:
    return world.value("voice_comparisons_total", outcome=outcome) or 0


async def test_another_voice_as_loud_as_the_user_is_held_shortly_and_does_not_interrupt(
    world, model
):
    async with world.connect() as client:
        client.turn_detection({"ignore_backchannels": True})
        await client.until("session.updated")
        events = await heard(world, model, client, OTHER)
    assert STARTED not in events
    assert events[:2] == [SUSPECTED, IGNORED]
    assert ("other_voice", "far") in decisions(world)
    assert ("turn", "voice") not in decisions(world)


async def test_the_user_interrupts(world, model):
    async with world.connect() as client:
        assert STARTED in await heard(world, model, client, USER[:OUTPUT_RATE_HZ], by=SELF)
    assert comparisons(world, "near") >= 1
    assert ("other_voice", "far") not in decisions(world)


async def test_the_user_interrupts_after_another_voice(world, model):
    async with world.connect() as client:
        assert STARTED not in await heard(world, model, client, OTHER)
        model.speaks = SELF
        assert STARTED in await over(world, client, USER[:OUTPUT_RATE_HZ])


async def test_another_voice_interrupts_a_client_that_wants_it(world, model):
    async with world.connect() as client:
        client.turn_detection({"ignore_other_voices": False})
        await client.until("session.updated")
        await heard_over_a_response(world, client)
        model.speaks = ANOTHER
        assert STARTED in await over(world, client, OTHER)
    assert model.n_calls == 0


async def test_before_the_first_turn_any_voice_interrupts(world, model):
    async with world.connect() as client:
        client.send("response.create")
        await client.until("response.output_audio.delta")
        model.speaks = ANOTHER
        assert STARTED in await over(world, client, OTHER)


async def test_a_word_too_short_to_be_compared_takes_the_turn_when_it_is_over(world, model):
    model_word = USER[: int(0.65 * OUTPUT_RATE_HZ)]
    async with world.connect() as client:
        client.turn_detection({"ignore_backchannels": False})
        await client.until("session.updated")
        doubtful = np.float32([0.7, np.sqrt(1 - 0.49)])
        silence = np.zeros(OUTPUT_RATE_HZ // 2)
        events = await heard(world, model, client, model_word, silence, by=doubtful)
    assert STARTED in events
    assert decisions(world).get(("turn", "undecided")) == 1


@pytest.mark.parametrize("outcome", ["failed", "late"])
async def test_without_a_comparison_a_voice_counts_as_before(world, model, outcome, caplog):
    async with world.connect() as client:
        await heard_over_a_response(world, client)
        await learnt(world)
        model.speaks = ANOTHER
        if outcome == "failed":
            model.fails = True
        else:
            world.shared.speaker_thread.patience_s = 0.05
            model.waits_for = threading.Event()
        client.append(pcm16(OTHER[:OUTPUT_RATE_HZ]))
        events = types(await client.until(STARTED))
        assert STARTED in events
        if model.waits_for:
            model.waits_for.set()
    assert comparisons(world, outcome) >= 1
    assert ("speaker_model_failed" in caplog.text) == (outcome == "failed")


async def test_a_turn_that_teaches_nothing_is_counted(world, model):
    async with world.connect() as client:
        client.append(
            pcm16(np.concatenate((USER[: OUTPUT_RATE_HZ // 2], np.zeros(OUTPUT_RATE_HZ))))
        )
        await client.until("response.created")
        await quiet(client)
    assert world.value("voices_learnt_total", outcome="short") == 1
    assert model.n_calls == 0


# --- turns ---


async def turn(client, samples: np.ndarray) -> dict:
    """The response to a turn."""
    client.append(pcm16(np.concatenate((samples, np.zeros(OUTPUT_RATE_HZ)))))
    return (await client.find("response.done"))["response"]


def turns_world(model, n: int) -> World:
    made = World(*[spoken("Yes?")] * n, knows_voices=True)
    made.shared.scorer = SpeechScorer(SileroModel())
    made.shared.speaker_thread = SpeakerThread(model, PATIENCE_S)
    return made


async def test_a_turn_of_another_person_has_no_response_and_teaches_nothing(model):
    world = turns_world(model, 2)
    async with world.connect() as client:
        client.turn_detection({"ignore_other_turns": True})
        await client.until("session.updated")
        assert (await turn(client, USER))["output"]
        await learnt(world)
        world.clock.advance(60)
        model.speaks = ANOTHER
        ignored = await turn(client, OTHER)
        assert (ignored["status"], ignored["output"]) == ("completed", [])
        await learnt(world, outcome="other")
        world.clock.advance(60)
        model.speaks = SELF
        assert (await turn(client, USER))["output"]
        [first, second] = world.orchestrator.turns
        assert len(second.history) == len(first.history) + 2  # the response, and the user's turn
    assert world.value("other_turns_total") == 1
    assert world.value("voices_learnt_total", outcome="other") == 1
    world.shared.close()


async def test_by_default_a_household_member_has_turns(model):
    world = turns_world(model, 2)
    async with world.connect() as client:
        await turn(client, USER)
        world.clock.advance(60)
        model.speaks = ANOTHER
        assert (await turn(client, OTHER))["output"]
    assert world.value("other_turns_total") == 0
    world.shared.close()


async def test_a_failing_model_leaves_turns_as_they_are(model):
    world = turns_world(model, 2)
    async with world.connect() as client:
        client.turn_detection({"ignore_other_turns": True})
        await client.until("session.updated")
        await turn(client, USER)
        await learnt(world)
        world.clock.advance(60)
        model.speaks, model.fails = ANOTHER, True
        assert (await turn(client, OTHER))["output"]
    world.shared.close()


# --- the settings ---


async def test_a_server_with_a_speaker_model_ignores_other_voices_by_default():
    async with connected(FakeOrchestrator(), knows_voices=True) as client:
        client.turn_detection({"ignore_other_voices": None, "ignore_other_turns": None})
        session = (await client.expect("session.updated"))["session"]
        detection = session["audio"]["input"]["turn_detection"]
        assert detection["ignore_other_voices"] is True
        assert detection["ignore_other_turns"] is False


@pytest.mark.parametrize("key", ["ignore_other_voices", "ignore_other_turns"])
async def test_a_server_without_a_speaker_model_refuses_the_settings(key):
    async with connected(FakeOrchestrator()) as client:
        client.turn_detection({key: True})
        error = (await client.expect("error"))["error"]
        assert error["code"] == "no_speaker_model"
        assert error["param"] == f"session.audio.input.turn_detection.{key}"
        client.turn_detection({key: False})
        assert (await client.expect("session.updated"))["session"]
        client.turn_detection({key: 3})
        assert (await client.expect("error"))["error"]["type"] == "invalid_request_error"
