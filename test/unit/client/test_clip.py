import numpy as np
import pytest
import soundfile

from sglang_live.client import clip
from sglang_live.client.clip import BUNDLED_CLIP


def tone(duration_s: float, amplitude: int) -> bytes:
    t = np.arange(round(duration_s * clip.SAMPLE_RATE_HZ)) / clip.SAMPLE_RATE_HZ
    return (amplitude * np.sin(2 * np.pi * 440 * t)).astype("<i2").tobytes()


def test_end_of_speech_is_the_last_frame_within_35_db_of_the_loudest():
    speech, murmur, room = tone(0.1, 16000), tone(0.1, 400), tone(0.1, 100)
    assert clip.speech_frames(speech + murmur + room) == 10, "400 is 32 dB down, 100 is 44"


def test_a_silent_clip_ends_with_its_last_frame():
    assert clip.speech_frames(bytes(3 * clip.FRAME_BYTES)) == 3
    assert clip.speech_frames(b"") == 0


def test_the_last_frame_is_padded_to_20_ms():
    cut = clip.frames(bytes(clip.FRAME_BYTES + 10))
    assert [len(frame) for frame in cut] == [clip.FRAME_BYTES] * 2


@pytest.mark.parametrize("rate_hz", [8000, 16000, 24000, 44100, 48000])
def test_a_file_of_any_rate_keeps_its_duration(tmp_path, rate_hz):
    path = tmp_path / "clip.wav"
    soundfile.write(path, np.zeros((rate_hz, 2), np.float32), rate_hz)
    assert clip.duration_s(clip.load_pcm(path)) == pytest.approx(1.0, abs=0.001)


def test_full_scale_audio_is_clipped_not_wrapped(tmp_path):
    path = tmp_path / "loud.wav"
    square = np.sign(np.sin(np.arange(16000) / 10)).astype(np.float32)
    soundfile.write(path, square, 16000)
    samples = np.frombuffer(clip.load_pcm(path), "<i2").astype(int)
    assert np.abs(np.diff(samples)).max() < 65000


@pytest.mark.parametrize("content", [b"", b"not audio at all"])
def test_a_file_without_audio_is_a_clear_error(tmp_path, content):
    path = tmp_path / "broken.wav"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.wav"):
        clip.load_pcm(path)


def test_the_written_wav_reads_back_bit_equal(tmp_path):
    pcm = tone(0.1, 12345)
    clip.write_wav(tmp_path / "out.wav", pcm)
    samples, rate_hz = soundfile.read(tmp_path / "out.wav", dtype="int16")
    assert rate_hz == clip.SAMPLE_RATE_HZ
    assert samples.tobytes() == pcm


def test_level_of_a_full_scale_sine():
    level = clip.measure_level(tone(1.0, 32767))
    assert level.duration_s == 1.0
    assert level.peak_dbfs == pytest.approx(0.0, abs=0.1)
    assert level.rms_dbfs == pytest.approx(-3.0, abs=0.1)
    assert clip.measure_level(bytes(100)).peak_dbfs == float("-inf")


def test_the_bundled_recording_is_two_seconds_of_speech():
    pcm = clip.load_pcm(BUNDLED_CLIP)
    assert clip.duration_s(pcm) == pytest.approx(2.33, abs=0.01)
    assert clip.speech_frames(pcm) * clip.FRAME_S == pytest.approx(2.0, abs=0.1)
