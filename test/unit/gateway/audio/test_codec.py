"""Wire formats: G.711, sample rates, base64, frame lengths."""

import base64

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.gateway.audio.codec import (
    MAX_FRAME_MS,
    PCM,
    PCMA,
    PCMU,
    WireDecoder,
    WireEncoder,
    decode_base64,
    decode_clip,
    encode_clip,
)
from sglang_live.gateway.audio.resampler import StreamResampler, resample
from sglang_live.gateway.errors import ClientEventError
from sglang_live.sound import g711

RATES = [(24_000, 16_000), (8_000, 16_000), (24_000, 8_000), (16_000, 24_000)]
ALL_INT16 = np.arange(-32768, 32768).astype(np.int16)
ALL_CODES = np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("decode", "encode"),
    [(g711.mulaw_decode, g711.mulaw_encode), (g711.alaw_decode, g711.alaw_encode)],
    ids=["mulaw", "alaw"],
)
def test_g711_codes_round_trip_and_samples_keep_their_sign_and_size(decode, encode):
    kept = encode(decode(ALL_CODES))
    # Mu-law has two zeros; only the positive one is written.
    assert set(ALL_CODES[kept != ALL_CODES]) <= {0x7F}
    back = decode(encode(ALL_INT16)).astype(int)
    assert np.all(np.diff(back) >= 0)
    # Four bits of mantissa: half a step is 1/32 of the value, and 8 near zero.
    size = np.minimum(np.abs(ALL_INT16.astype(int)), 32_124)
    assert np.all(np.abs(np.abs(back) - size) <= size / 32 + 8)


def test_g711_matches_known_codes():
    # ITU-T G.711, tables 1 and 2: ends of the scale and zero.
    assert g711.mulaw_encode(np.array([0, 32767, -32768], np.int16)).tolist() == [0xFF, 0x80, 0x00]
    assert g711.alaw_encode(np.array([0, 32767, -32768], np.int16)).tolist() == [0xD5, 0xAA, 0x2A]
    assert g711.mulaw_decode(np.array([0xFF, 0x80, 0x00], np.uint8)).tolist() == [0, 32124, -32124]
    assert g711.alaw_decode(np.array([0xD5, 0xAA, 0x2A], np.uint8)).tolist() == [8, 32256, -32256]


def _streamed(pcm: np.ndarray, rate_in: int, rate_out: int) -> np.ndarray:
    stream = StreamResampler(rate_in, rate_out)
    return np.concatenate((stream.push(pcm), stream.finish()))


both_ways = pytest.mark.parametrize("resampled", [_streamed, resample])


@both_ways
@pytest.mark.parametrize(("rate_in", "rate_out"), RATES)
def test_resampling_agrees_with_soxr_in_the_speech_band(resampled, rate_in, rate_out):
    t = np.arange(rate_in) / rate_in
    speech_band = (200, 700, 1500, 2900)
    pcm = (sum(4000 * np.sin(2 * np.pi * f * t + f) for f in speech_band)).astype(np.int16)
    ours = resampled(pcm, rate_in, rate_out).astype(float)
    reference = soxr.resample(pcm, rate_in, rate_out, quality="VHQ").astype(float)
    assert len(ours) == rate_out
    middle = slice(rate_out // 10, -rate_out // 10)
    difference = np.sqrt(np.mean((ours - reference)[middle] ** 2))
    assert difference < 2  # of 32768: rounding


@both_ways
@pytest.mark.parametrize(("rate_in", "rate_out"), [(24_000, 16_000), (24_000, 8_000)])
def test_frequencies_that_would_alias_are_removed(resampled, rate_in, rate_out):
    t = np.arange(rate_in) / rate_in
    pcm = (10_000 * np.sin(2 * np.pi * (rate_out / 2 + 1000) * t)).astype(np.int16)
    middle = resampled(pcm, rate_in, rate_out)[rate_out // 10 : -rate_out // 10]
    assert np.abs(middle).max() <= 10


@settings(max_examples=40, derandomize=True)
@given(
    rates=st.sampled_from(RATES),
    sizes=st.lists(st.integers(0, 700), max_size=12),
    seed=st.integers(0, 9),
)
def test_resampling_in_pieces_equals_resampling_at_once(rates, sizes, seed):
    rate_in, rate_out = rates
    pcm = np.random.default_rng(seed).integers(-20_000, 20_000, sum(sizes)).astype(np.int16)
    stream = StreamResampler(rate_in, rate_out)
    cuts = np.cumsum(sizes)[:-1] if sizes else []
    out = [stream.push(piece) for piece in np.split(pcm, cuts)]
    assert stream.owed_samples * 1000 / rate_out <= 3
    out.append(stream.finish())
    whole = np.concatenate(out)
    assert len(whole) == -(-len(pcm) * rate_out // rate_in)
    assert np.array_equal(whole, _streamed(pcm, rate_in, rate_out))
    assert len(whole) == len(resample(pcm, rate_in, rate_out))


@pytest.mark.parametrize("form", [PCM, PCMU, PCMA], ids=lambda form: form.kind)
def test_an_encoded_clip_decodes_to_itself(form):
    t = np.arange(16_000) / 16_000
    clip = (9000 * np.sin(2 * np.pi * 440 * t)).astype(np.int16)
    back = decode_clip(encode_clip(clip, form), form)
    assert len(back) == len(clip)
    error = (back.astype(float) - clip)[1600:-1600]
    assert np.sqrt(np.mean(error**2)) < (3 if form is PCM else 200)


@pytest.mark.parametrize("form", [PCM, PCMU, PCMA], ids=lambda form: form.kind)
def test_digital_silence_stays_silent(form):
    decoder = WireDecoder(form)
    zero = {"audio/pcm": b"\x00\x00", "audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}[form.kind]
    assert np.abs(decoder.push(zero * 8000)).max() <= 10  # A-law has no zero
    assert np.abs(decode_clip(zero * 8000, form)).max() <= 10


@settings(max_examples=40, derandomize=True)
@given(
    form=st.sampled_from([PCM, PCMU]),
    durations_ms=st.lists(st.sampled_from([1, 5, 19, 20, 80, 250, 1000]), max_size=8),
)
def test_frames_hold_all_audio_in_20_to_200_ms(form, durations_ms):
    encoder = WireEncoder(form)
    frames = [frame for ms in durations_ms for frame in encoder.push(bytes(48 * ms))]
    assert all(form.duration_ms(len(frame)) >= 20 for frame in frames)
    frames += encoder.finish()
    assert all(form.duration_ms(len(frame)) <= MAX_FRAME_MS for frame in frames)
    assert sum(map(len, frames)) == form.n_bytes(sum(durations_ms))


def test_base64_is_strict_and_bounded():
    assert decode_base64("AAAAAA==", PCM, max_bytes=4, param="audio") == bytes(4)
    wrong = ["A", "AAA", "AA AA", "AAAA=", "AA-_", base64.b64encode(bytes(6)).decode()]
    for text in wrong:
        with pytest.raises(ClientEventError) as caught:
            decode_base64(text, PCM, max_bytes=4, param="here")
        assert caught.value.param == "here"
