"""An echo of what is played is explained, a user's voice is not."""

from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

from sglang_live.interaction.filters.echo import (
    MAX_DELAY_S,
    RATE_HZ,
    SPAN_S,
    delay_of,
    halved,
    unexplained,
)

DATA = Path(__file__).parents[3] / "data" / "audio"
WINDOW = 256
# At most a quarter of the energy is left: the window is echo.
ECHO_SHARE = 0.25
N, MOST = round(SPAN_S * RATE_HZ), round(MAX_DELAY_S * RATE_HZ)
LEVELS_DB, DELAYS_MS = (-10, -20, -30), (20, 100, 200, 400)


def voice(name: str) -> np.ndarray:
    pcm, _ = sf.read(DATA / name, dtype="int16")
    return halved(pcm)


AGENT, USER = voice("sp_jfk.flac"), voice("sp_librivox_0880.flac")


def room(rng: np.random.Generator, direct_db: float) -> np.ndarray:
    """An impulse response of 200 ms; direct_db: of the direct sound over the reverberation."""
    t = np.arange(round(0.2 * RATE_HZ))
    tail = rng.standard_normal(len(t)) * np.exp(-t / (0.04 * RATE_HZ))
    tail[0] = 0.0
    response = tail * 10 ** (-direct_db / 20) / np.sqrt((tail**2).sum())
    response[0] = 1.0
    return response / np.sqrt((response**2).sum())


def echo_of(played: np.ndarray, db: float, delay_ms: float, response=(1.0,)) -> np.ndarray:
    late = np.concatenate((np.zeros(round(delay_ms * RATE_HZ / 1000)), played))[: len(played)]
    heard = np.convolve(late, response)[: len(played)] * 10 ** (db / 20)
    noise = np.random.default_rng(3).normal(0, 10 ** (-75 / 20), len(played))
    return (heard + noise).astype(np.float32)


def all_shares(microphone: np.ndarray, played: np.ndarray) -> np.ndarray:
    """Of windows that are loud enough to be a voice, at many moments."""
    found = []
    for end in range(N + MOST, len(microphone), 4000):
        shares = unexplained(microphone[end - N : end], played[end - N - MOST : end], WINDOW)[-4:]
        windows = microphone[end - 4 * WINDOW : end].reshape(4, WINDOW)
        found.append(shares[np.sqrt((windows**2).mean(axis=1)) > 1e-3])
    return np.concatenate(found)


@pytest.mark.parametrize("db", LEVELS_DB)
@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_an_echo_is_explained(db, delay_ms):
    shares = all_shares(echo_of(AGENT, db, delay_ms), AGENT)
    assert len(shares) > 25 and np.mean(shares > ECHO_SHARE) < 0.05


@pytest.mark.parametrize(("direct_db", "most"), [(0, 0.25), (6, 0.15)])
def test_an_echo_with_reverberation_is_explained_but_for_its_tails(direct_db, most):
    response = room(np.random.default_rng(5), direct_db)
    shares = all_shares(echo_of(AGENT, -20, 100, response), AGENT)
    assert np.mean(shares > ECHO_SHARE) < most


@pytest.mark.parametrize("db", [-10, -20, -120])
def test_a_voice_over_an_echo_is_not_explained(db):
    user = np.tile(USER, 4)[: len(AGENT)]
    user *= AGENT.std() / user.std()
    shares = all_shares(echo_of(AGENT, db, 100) + user, AGENT)
    assert np.mean(shares > ECHO_SHARE) > 0.85


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
def test_the_delay_is_found(delay_ms):
    end = 4 * RATE_HZ
    heard = echo_of(AGENT, -20, delay_ms)[end - N : end]
    found = delay_of(heard, AGENT[end - N - MOST : end])
    assert found == pytest.approx(delay_ms * RATE_HZ / 1000, abs=8)


def test_silence_is_not_explained_by_anything():
    silence, played = np.zeros(N, np.float32), np.zeros(N + MOST, np.float32)
    assert (unexplained(silence, played, WINDOW) == 1.0).all()
    assert (unexplained(silence, AGENT[: N + MOST], WINDOW) == 1.0).all()
    shares = unexplained(USER[:N], played, WINDOW)
    assert np.isfinite(shares).all() and (shares > 0.9).all()
