"""A voice over a response: audio is held, released, or the response interrupted."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from sglang_live.clock import SimClock
from sglang_live.gateway.call.turns.barge_in import AudioHold
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.timeline import Timeline
from sglang_live.interaction.user_stats import UserPrior
from sglang_live.telemetry.metrics import GatewayMetrics
from test.unit.interaction.test_monitor import Stages


class FakeAudio:
    def __init__(self):
        self.any = True
        self.calls = []

    def hold(self):
        self.calls.append("hold")

    def release(self):
        self.calls.append("release")

    def interrupt(self):
        self.calls.append("interrupt")
        self.any = False


class World:
    def __init__(self):
        self.clock, self.audio = SimClock(10.0), FakeAudio()
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.timeline = Timeline("s", began_s=10.0, began_unix_s=0.0)
        monitor = SessionMonitor(Stages(), self.clock, self.metrics, self.timeline, UserPrior())
        self.hold = AudioHold(self.audio, self.audio.interrupt, monitor, self.clock, self.metrics)

    def value(self, name):
        return self.metrics.registry.get_sample_value(f"sglang_live_gateway_{name}")

    async def advance(self, seconds):
        await asyncio.sleep(0)
        self.clock.advance(seconds)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def world():
    return World()


async def test_a_suspicion_holds_and_a_dismissal_releases_and_counts_a_false_alarm(world):
    world.hold.begin(9.9, 1.25)
    await world.advance(0.3)
    world.hold.dismiss("backchannel", "short")
    assert world.audio.calls == ["hold", "release"]
    assert world.value("false_alarms_total") == 1
    assert world.value("barge_ins_total") == 0
    assert world.value("audio_on_hold_seconds_total") == pytest.approx(0.3)
    kinds = [event["event"] for event in world.timeline.to_json()["events"]]
    assert kinds == ["speech_suspected", "held", "speech_dismissed", "released"]


async def test_a_confirmed_suspicion_interrupts_and_the_stop_counts_from_the_hold(world):
    world.hold.begin(9.9, 1.25)
    await world.advance(0.15)
    world.hold.interrupt(9.9)
    assert world.audio.calls == ["hold", "interrupt", "release"]
    assert world.value("barge_ins_total") == 1
    assert world.value("stop_latency_seconds_sum") == pytest.approx(0.1)
    assert world.value("barge_in_latency_seconds_sum") == pytest.approx(0.25)


async def test_without_a_suspicion_the_response_is_interrupted_at_once(world):
    world.hold.interrupt(9.9)
    assert world.audio.calls == ["interrupt"]
    assert world.value("stop_latency_seconds_sum") == pytest.approx(0.1)


async def test_speech_while_nothing_is_audible_is_no_barge_in_but_ends_the_response(world):
    world.audio.any = False
    world.hold.interrupt(9.9)
    assert world.audio.calls == ["interrupt"]
    assert world.value("barge_ins_total") == 0


async def test_a_client_that_stops_sending_audio_cannot_hold_a_response_for_long(world):
    world.hold.begin(10.0, 1.25)
    await world.advance(1.2)
    assert world.audio.calls == ["hold"]
    await world.advance(0.1)
    assert world.audio.calls == ["hold", "release"]
    # Events of that voice still count.
    world.hold.interrupt(10.0)
    assert world.audio.calls[2:] == ["interrupt"]


async def test_a_withdrawn_suspicion_is_no_false_alarm(world):
    world.hold.begin(10.0, 1.25)
    world.hold.withdraw()
    world.hold.withdraw()
    assert world.audio.calls == ["hold", "release"]
    assert world.value("false_alarms_total") == 0
