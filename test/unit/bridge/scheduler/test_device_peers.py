"""Engines of one device see what later stages need."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.device_peers import (
    DEVICE_PEERS_ENV,
    MOST_SILENT_S,
    VALID_S,
    DevicePeers,
    device_peers_env,
)

INF = math.inf


def said(urgent: bool, gap_at_s: float, now_s: float):
    """Rounds, after a decision."""
    return SimpleNamespace(urgent=urgent, gap_at_s=gap_at_s, now_s=now_s)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    def start(stage: str, replica: int = 0, *devices: str) -> DevicePeers:
        used = devices or ("cuda:0",)
        monkeypatch.setenv(DEVICE_PEERS_ENV, device_peers_env(str(tmp_path), used, stage, replica))
        found = DevicePeers.from_env()
        assert found is not None
        return found

    return start


def test_an_engine_sees_the_urgency_of_later_stages_on_its_device_only(engine):
    thinker, other, talker = engine("thinker"), engine("thinker", 1), engine("talker", 2)
    elsewhere = engine("talker", 0, "cuda:1")
    talker.publish(said(True, INF, 100.0))
    assert thinker.urgent(100.01) and other.urgent(100.01)
    talker.publish(said(False, INF, 100.02))
    assert not thinker.urgent(100.02)
    for others in (thinker, elsewhere):
        others.publish(said(True, INF, 100.02))
    assert not any(here.urgent(100.03) for here in (thinker, other, talker, elsewhere))


def test_an_engine_of_several_devices_has_peers_on_each(engine):
    thinker, alone = engine("thinker", 0, "cuda:0", "cuda:1"), engine("thinker", 1, "cuda:2")
    first, second = engine("talker", 0, "cuda:1"), engine("talker", 1, "cuda:2", "cuda:3")
    first.publish(said(True, INF, 100.0))
    assert thinker.urgent(100.01) and not alone.urgent(100.01)
    first.publish(said(False, INF, 100.0))
    second.publish(said(True, INF, 100.0))
    assert alone.urgent(100.01) and not thinker.urgent(100.01)


def test_the_urgency_of_a_silent_engine_expires(engine):
    thinker, talker = engine("thinker"), engine("talker")
    talker.publish(said(True, INF, 100.0))
    assert thinker.urgent(100.0 + 0.9 * VALID_S)
    assert not thinker.urgent(100.0 + 1.1 * VALID_S)


def test_an_engine_sees_how_long_the_listeners_of_later_stages_could_wait(engine):
    thinker, elsewhere = engine("thinker"), engine("thinker", 1, "cuda:1")
    first, second = engine("talker"), engine("talker", 1)
    assert thinker.slack_s(100.0) == INF
    first.publish(said(False, 100.5, 100.0))
    second.publish(said(False, 100.25, 100.0))
    assert thinker.slack_s(100.0) == 0.25
    assert thinker.slack_s(100.1) == pytest.approx(0.15)
    assert thinker.slack_s(100.3) == 0.0
    assert elsewhere.slack_s(100.0) == first.slack_s(100.0) == INF
    second.publish(said(False, INF, 100.1))  # its last listener has gone
    assert thinker.slack_s(100.1) == pytest.approx(0.4)


def test_a_listener_who_has_been_without_sound_for_long_is_not_protected(engine):
    thinker, talker = engine("thinker"), engine("talker")
    talker.publish(said(False, 100.0, 100.0))
    assert thinker.slack_s(100.0 + 0.9 * MOST_SILENT_S) == 0.0
    assert thinker.slack_s(100.0 + 1.1 * MOST_SILENT_S) == INF


def test_a_restarted_engine_uses_the_same_place(engine):
    thinker = engine("thinker")
    engine("talker").publish(said(True, INF, 100.0))
    engine("talker").publish(said(False, INF, 100.01))
    assert not thinker.urgent(100.02)


def test_without_the_variable_an_engine_has_its_device_to_itself(monkeypatch):
    monkeypatch.delenv(DEVICE_PEERS_ENV, raising=False)
    peers = DevicePeers.from_env()
    peers.publish(said(True, INF, 100.0))
    assert not peers.urgent(100.0) and peers.slack_s(100.0) == INF


def test_a_replica_number_beyond_the_stages_places_is_refused():
    with pytest.raises(ValueError, match="at most"):
        device_peers_env("run", ["cuda:0"], "thinker", 5000)
