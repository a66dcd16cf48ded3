"""The sound of calls: lost, late and mixed packets; the queue of what is spoken."""

import heapq
import random
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf
import soxr

from sglang_live.webrtc.messages import HEARD_RATE_HZ, PACKET_BYTES, SENT_RATE_HZ
from sglang_live.webrtc.opus import Decoder, Encoder, OpusError, samples_in
from sglang_live.webrtc.receive import RTP_RATE_HZ, ReceivePath
from sglang_live.webrtc.send import SendPath

AUDIO = Path(__file__).parents[2] / "data" / "audio"
FRAME = HEARD_RATE_HZ // 50


@pytest.fixture(scope="module")
def speech() -> np.ndarray:
    pcm, rate_hz = sf.read(AUDIO / "sp_jfk.flac", dtype="float32")
    whole = soxr.resample(pcm, rate_hz, SENT_RATE_HZ)
    return (np.concatenate([whole, np.zeros(SENT_RATE_HZ)]) * 32_767).astype(np.int16)


def packets_of(pcm: np.ndarray, loss: float = 0.1) -> list[bytes]:
    encoder = Encoder(SENT_RATE_HZ)
    encoder.expect_loss(loss)
    n = PACKET_BYTES // 2
    return [encoder.encode(pcm[at : at + n].tobytes()) for at in range(0, len(pcm) - n + 1, n)]


def received(
    packets: list[bytes],
    *,
    loss: float = 0.0,
    jitter_s: float = 0.0,
    seed: int = 1,
    drift: float = 0.0,
    first_timestamp: int = 0,
) -> tuple[np.ndarray, ReceivePath, int]:
    """What is heard, the path, and the number of ticks since the first packet."""
    rng = random.Random(seed)
    arrivals = [
        (0.02 * n * (1 + drift) + rng.random() * jitter_s, n, packet)
        for n, packet in enumerate(packets)
        if rng.random() >= loss
    ]
    heapq.heapify(arrivals)
    first_s, path, frames, ticks = arrivals[0][0], ReceivePath(), [], 0
    until_s = first_s + 0.02 * len(packets) * (1 + drift)
    now_s = first_s
    while now_s < until_s:
        while arrivals and arrivals[0][0] <= now_s:
            _, n, packet = heapq.heappop(arrivals)
            path.push((first_timestamp + n * RTP_RATE_HZ // 50) % (1 << 32), packet)
        frame = path.tick()
        ticks += 1
        if frame is not None:
            assert len(frame) == 2 * FRAME
            frames.append(frame)
        now_s += 0.02
    return np.frombuffer(b"".join(frames), "<i2"), path, ticks


def likeness(heard: np.ndarray, pcm: np.ndarray) -> float:
    """Correlation of the loudness, in 20 ms, at the best delay up to 0.6 s."""
    reference = soxr.resample(pcm.astype(np.float32), SENT_RATE_HZ, HEARD_RATE_HZ)
    frames = [x[: len(x) // FRAME * FRAME].astype(float) for x in (heard, reference)]
    a, b = (np.log10(np.square(x).reshape(-1, FRAME).mean(1) + 100) for x in frames)
    return max(
        float(np.corrcoef(a[d : d + len(b) - 30], b[: len(a[d : d + len(b) - 30])])[0, 1])
        for d in range(30)
    )


@pytest.mark.parametrize(
    ("loss", "jitter_s", "least"),
    [(0, 0, 0.98), (0, 0.1, 0.97), (0.02, 0.1, 0.97), (0.1, 0, 0.97), (0.1, 0.1, 0.95)],
)
def test_time_is_never_lost_and_speech_stays_speech(speech, loss, jitter_s, least):
    heard, path, ticks = received(packets_of(speech), loss=loss, jitter_s=jitter_s)
    # A frame at each tick, but for the first ones, while the buffer fills.
    assert ticks - 3 <= len(heard) // FRAME <= ticks
    assert likeness(heard, speech) > least, likeness(heard, speech)
    assert path.n_late < 0.03 * ticks  # before the buffer knows the network


def test_lost_packets_are_recovered_from_the_next_ones(speech):
    _, path, ticks = received(packets_of(speech), loss=0.1)
    assert path.n_recovered > 0.07 * ticks
    assert path.n_concealed < 0.05 * ticks


def test_a_hole_of_a_second_is_silent_and_a_second_long(speech):
    packets = packets_of(speech)
    path, frames = ReceivePath(), []
    for n, packet in enumerate(packets[:300]):
        if not 100 <= n < 150:
            path.push(n * 960, packet)
        if (frame := path.tick()) is not None:
            frames.append(frame)
    assert len(frames) >= 297
    pcm = np.frombuffer(b"".join(frames), "<i2").reshape(-1, FRAME)
    quiet = np.abs(pcm).max(1) == 0
    assert 40 <= quiet[100:155].sum() <= 50
    # Afterwards it is heard as if nothing had been missing: at most a few frames later.
    whole, _, _ = received(packets[:300])
    assert (
        likeness(
            pcm[160:].ravel(),
            soxr.resample(whole[160 * FRAME :].astype(np.float32), HEARD_RATE_HZ, SENT_RATE_HZ),
        )
        > 0.95
    )


def test_depth_follows_the_network_and_comes_back(speech):
    packets = packets_of(np.tile(speech, 4))
    path, rng, depths = ReceivePath(), random.Random(2), []
    arrivals = sorted(
        (0.02 * n + (rng.random() * 0.15 if n < 1000 else 0), n) for n in range(len(packets))
    )
    at = 0
    for tick in range(len(packets)):
        while at < len(arrivals) and arrivals[at][0] <= 0.02 * tick:
            n = arrivals[at][1]
            path.push(n * 960, packets[n])
            at += 1
        path.tick()
        if path._next is not None:
            depths.append(tick - path._next // 960)
    assert 5 <= np.median(depths[600:1000]) <= 12
    assert np.median(depths[-200:]) <= 5


@pytest.mark.parametrize("drift", [-0.001, 0.001])
def test_a_clock_that_goes_wrong_does_not_move_the_sound(speech, drift):
    packets = packets_of(np.tile(speech, 6))
    heard, path, _ = received(packets, drift=drift)
    assert path.n_late == 0
    assert abs(path._depth()) <= 6
    assert likeness(heard[-20 * HEARD_RATE_HZ :], np.tile(speech, 6)[-20 * SENT_RATE_HZ :]) > 0.9


def test_timestamps_wrap(speech):
    heard, path, ticks = received(packets_of(speech)[:200], first_timestamp=(1 << 32) - 96_000)
    assert path.n_late == path.n_concealed == 0
    assert len(heard) // FRAME >= ticks - 3


def test_another_stream_of_timestamps_is_heard(speech):
    packets, path, frames = packets_of(speech), ReceivePath(), []
    for n, packet in enumerate(packets[:200]):
        path.push(n * 960 if n < 100 else 2_000_000_000 + n * 960, packet)
        frames.append(path.tick())
    assert path.n_late == 0 and path.n_concealed < 5


@pytest.mark.parametrize("frame_ms", [10, 40, 60])
def test_packets_of_other_lengths(speech, frame_ms):
    encoder, n = Encoder(SENT_RATE_HZ), SENT_RATE_HZ * frame_ms // 1000
    path, frames = ReceivePath(), []
    due_ms = 0
    for at in range(0, 6 * SENT_RATE_HZ, n):
        path.push(2 * at, encoder.encode(speech[at : at + n].tobytes()))
        due_ms += frame_ms
        while due_ms >= 20:
            due_ms -= 20
            if (frame := path.tick()) is not None:
                frames.append(frame)
    heard = np.frombuffer(b"".join(frames), "<i2")
    assert likeness(heard, speech[: 6 * SENT_RATE_HZ]) > 0.95


def test_packets_of_noise_neither_crash_nor_stop_the_time():
    path, rng = ReceivePath(), random.Random(4)
    packet = packets_of(np.zeros(4800, np.int16))[0]
    path.push(0, packet)
    n_frames = 0
    for _ in range(2000):
        for _ in range(rng.randrange(3)):
            path.push(rng.randrange(1 << 32), rng.randbytes(rng.randrange(0, 200)))
        n_frames += path.tick() is not None
    assert n_frames >= 1997
    assert len(path._packets) < 2000


def test_what_is_no_packet_is_told():
    with pytest.raises(OpusError):
        samples_in(b"", RTP_RATE_HZ)
    assert len(Decoder(HEARD_RATE_HZ).conceal(FRAME)) == 2 * FRAME


# --- the way out ---


def ticks(path: SendPath, n: int) -> list[tuple[str, int]]:
    found = []
    for _ in range(n):
        packet, lane, n_bytes = path.tick()
        if packet is not None:
            found.append((lane, n_bytes))
    return found


def test_responses_leave_one_after_another_in_packets_of_20_ms():
    path = SendPath()
    path.play("a", bytes(2 * PACKET_BYTES + 100))
    assert ticks(path, 3) == [("a", PACKET_BYTES), ("a", PACKET_BYTES), ("", 0)]
    path.play("a", bytes(PACKET_BYTES - 100))
    assert ticks(path, 1) == [("a", PACKET_BYTES)]
    path.play("a", bytes(50))
    path.played_out("a")
    path.play("b", bytes(PACKET_BYTES))
    assert ticks(path, 2) == [("a", 50), ("b", PACKET_BYTES)]


def test_silence_is_not_sent_but_for_a_tail():
    path = SendPath()
    assert ticks(path, 5) == []
    path.play("a", bytes(PACKET_BYTES))
    path.played_out("a")
    assert ticks(path, 20) == [("a", PACKET_BYTES), *[("", 0)] * 5]


def test_a_hold_of_a_response_that_has_left_stops_no_other():
    path = SendPath()
    path.play("a", bytes(PACKET_BYTES))
    path.played_out("a")
    assert ticks(path, 2)[0] == ("a", PACKET_BYTES)
    path.hold("a", held=True)
    path.hold("a", held=False)
    path.play("b", bytes(PACKET_BYTES))
    assert ("b", PACKET_BYTES) in ticks(path, 2)


def test_what_is_held_stays_and_what_is_discarded_never_leaves():
    path = SendPath()
    path.play("a", bytes(3 * PACKET_BYTES))
    path.hold("a", held=True)
    assert ticks(path, 3) == []
    path.hold("a", held=False)
    assert ticks(path, 1) == [("a", PACKET_BYTES)]
    path.discard("a")
    path.play("b", bytes(PACKET_BYTES))
    assert ticks(path, 1) == [("b", PACKET_BYTES)]


def test_packets_repeat_more_when_more_is_lost(speech):
    sizes = {loss: sum(map(len, packets_of(speech, loss))) for loss in (0.0, 0.2)}
    assert sizes[0.2] != sizes[0.0]
