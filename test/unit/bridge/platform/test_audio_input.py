"""Decoding of request audio; none of it is dropped without an error."""

import asyncio
import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile as sf
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.bridge.platform.audio_input import (
    MAX_CLIP_S,
    check_audio_landed,
    load_audio,
    placeholder_spans,
)

RATE_HZ = 16_000
TONE_HZ = 440
PAD = 5


def tone(rate_hz: int = RATE_HZ, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(round(rate_hz * seconds)) / rate_hz)


def file_bytes(samples: np.ndarray, rate_hz: int = RATE_HZ, **options) -> bytes:
    out = io.BytesIO()
    sf.write(out, samples, rate_hz, **({"format": "WAV", "subtype": "PCM_16"} | options))
    return out.getvalue()


def pitch_hz(audio: np.ndarray) -> float:
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(len(audio))))
    return float(np.argmax(spectrum) * RATE_HZ / len(audio))


# --- what it decodes ---


def test_16_bit_samples_come_out_exactly():
    pcm = np.array([0, 1, -1, 32767, -32768, 1234], np.int16)
    audio = load_audio(file_bytes(pcm))
    assert audio.dtype == np.float32
    assert (audio * 32768).tolist() == pcm.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"format": "WAV", "subtype": "FLOAT"},
        {"format": "WAV", "subtype": "PCM_24"},
        {"format": "WAV", "subtype": "ULAW"},
        {"format": "FLAC", "subtype": "PCM_16"},
        {"format": "OGG", "subtype": "VORBIS"},
        {"format": "MP3", "subtype": "MPEG_LAYER_III"},
    ],
    ids=lambda options: f"{options['format']} {options['subtype']}",
)
def test_every_common_format_decodes_to_its_sound(options):
    audio = load_audio(file_bytes(tone(), **options))
    assert len(audio) == pytest.approx(RATE_HZ / 2, abs=2500)  # MP3 pads both ends
    assert pitch_hz(audio) == pytest.approx(TONE_HZ, abs=5)


@pytest.mark.parametrize("rate_hz", [7_350, 8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
def test_any_rate_becomes_16_khz_at_the_same_pitch_and_length(rate_hz):
    audio = load_audio(file_bytes(tone(rate_hz), rate_hz))
    assert len(audio) == pytest.approx(RATE_HZ / 2, abs=2)
    assert pitch_hz(audio) == pytest.approx(TONE_HZ, abs=5)
    assert np.abs(audio).max() == pytest.approx(0.5, abs=0.05)


def test_another_rate_can_be_requested():
    assert len(load_audio(file_bytes(tone()), sr=24_000)) == 12_000


def test_stereo_is_mixed_unless_both_channels_are_wanted():
    both = np.stack((tone(), np.zeros(RATE_HZ // 2)), axis=1)
    mixed = load_audio(file_bytes(both))
    assert mixed.shape == (RATE_HZ // 2,)
    assert np.abs(mixed).max() == pytest.approx(0.25, abs=0.01)
    assert load_audio(file_bytes(both), mono=False).shape == (RATE_HZ // 2, 2)


@pytest.mark.parametrize("form", ["bytes", "data uri", "path", "file url", "http url"])
def test_a_clip_may_have_any_accepted_form(form, tmp_path, monkeypatch):
    data = file_bytes(tone())
    path = tmp_path / "a clip.wav"
    path.write_bytes(data)
    if form == "http url":
        common = pytest.importorskip("sglang.srt.utils.common")
        monkeypatch.setattr(common, "download_remote_media", lambda url, timeout: data)
    source = {
        "bytes": data,
        "data uri": f"data:audio/wav;base64,{base64.b64encode(data).decode()}",
        "path": str(path),
        "file url": path.as_uri(),  # with %20
        "http url": "http://example.com/clip.wav",
    }[form]
    np.testing.assert_array_equal(load_audio(source), load_audio(data))


# --- what it refuses ---


@pytest.mark.parametrize(
    "source",
    [
        b"",
        b"garbage" * 100,
        file_bytes(tone())[:20],
        file_bytes(np.zeros(0)),
        file_bytes(np.zeros(1), 96_000),  # less than one sample at 16 kHz
        "",
        "data:audio/wav;base64,not base64!",
        "data:audio/wav",
        "data:audio/wav;base64,",
        "/no/such/file.wav",
        None,
        7,
    ],
    ids=[
        "no bytes",
        "garbage",
        "cut in its header",
        "no samples",
        "nothing left at the rate wanted",
        "no name",
        "bad base64",
        "data uri without data",
        "data uri of nothing",
        "no file",
        "none",
        "a number",
    ],
)
def test_bytes_that_are_not_audio_are_a_value_error(source):
    with pytest.raises(ValueError, match=r"Could not decode audio|Invalid audio"):
        load_audio(source)


# --- placeholders ---


def spans_one_by_one(ids: list[int]) -> list[tuple[int, int]]:
    spans, first = [], None
    for at, token in enumerate([*ids, None]):
        if token == PAD and first is None:
            first = at
        elif token != PAD and first is not None:
            spans.append((first, at - 1))
            first = None
    return spans


@given(st.lists(st.sampled_from([PAD, PAD, 1, 2]), max_size=12))
def test_placeholder_spans_are_the_runs_of_a_linear_scan(ids):
    assert placeholder_spans(torch.tensor(ids, dtype=torch.int64), PAD) == spans_one_by_one(ids)


@pytest.mark.parametrize(
    ("ids", "spans"),
    [
        ([PAD, 1, PAD], [(0, 0), (2, 2)]),  # a rolled comparison sees neither of them
        ([PAD, PAD], [(0, 1)]),
        ([1, 2], []),
        ([], []),
    ],
    ids=["begins and ends with one", "nothing else", "none", "empty"],
)
def test_placeholders_at_the_edges_are_found(ids, spans):
    assert placeholder_spans(torch.tensor(ids, dtype=torch.int64), PAD) == spans


# --- nothing is dropped ---


def item(kind: str, offsets: list | None):
    return SimpleNamespace(is_audio=lambda: kind == "audio", offsets=offsets)


def processor_of(**thinker_config):
    return SimpleNamespace(hf_config=SimpleNamespace(**thinker_config))


def check(result, n_clips: int | None):
    """What check_audio_landed makes of a processor's result for a request of n_clips."""
    seen, own = [], processor_of()

    async def processor(*args, **kwargs):
        seen.append((args, kwargs))
        return result

    clips = None if n_clips is None else [file_bytes(tone())] * n_clips
    request = SimpleNamespace(audio_data=clips)
    checked = asyncio.run(
        check_audio_landed(processor, own, [], "prompt", request, 1, max_req_input_len=2)
    )
    assert seen == [((own, [], "prompt", request, 1), {"max_req_input_len": 2})]
    return checked


@pytest.mark.parametrize(
    ("items", "n_clips"),
    [
        ([item("audio", [(1, 5), (7, 9)])], 2),
        ([item("audio", [(1, 5)]), item("audio", [(7, 9)])], 2),
        ([item("image", [(1, 5)]), item("audio", [(7, 9)])], 1),
        ([item("image", [(1, 5)])], 0),
        ([], None),
    ],
    ids=["one item of two clips", "two items", "beside an image", "images alone", "no media"],
)
def test_a_request_with_a_placeholder_for_each_clip_passes_unchanged(items, n_clips):
    result = SimpleNamespace(mm_items=items)
    assert check(result, n_clips) is result


@pytest.mark.parametrize(
    ("result", "n_landed", "n_clips"),
    [
        (None, 0, 1),
        (SimpleNamespace(mm_items=[]), 0, 2),
        (SimpleNamespace(mm_items=[item("audio", None)]), 0, 1),
        (SimpleNamespace(mm_items=[item("audio", [(1, 2)])]), 1, 2),
        (SimpleNamespace(mm_items=[item("image", [(1, 2)])]), 0, 1),
        (SimpleNamespace(mm_items=[item("audio", [(1, 2), (4, 5)])]), 2, 1),
    ],
    ids=["no result", "no items", "no offsets", "one of two", "only an image", "too many"],
)
def test_a_clip_without_a_placeholder_is_an_error_with_the_counts(result, n_landed, n_clips):
    with pytest.raises(ValueError, match=f"a place for {n_landed} of {n_clips} audio clips"):
        check(result, n_clips)


def test_clips_that_are_too_long_together_are_refused_before_decoding():
    silence = file_bytes(np.zeros(250 * RATE_HZ, np.int16), format="FLAC")
    assert len(silence) < 100_000
    request = SimpleNamespace(audio_data=[silence] * 3)
    with pytest.raises(ValueError, match="longer than 100 s"):
        asyncio.run(check_audio_landed(None, processor_of(), [], "", request))


def test_several_clips_are_fetched_once_and_passed_on(tmp_path):
    path = tmp_path / "clip.wav"
    path.write_bytes(file_bytes(tone()))
    request = SimpleNamespace(audio_data=[str(path), file_bytes(tone()), {"format": "features"}])

    async def processor(*_args):
        return SimpleNamespace(mm_items=[item("audio", [(1, 2)] * 3)])

    asyncio.run(check_audio_landed(processor, processor_of(), [], "", request))
    assert request.audio_data == [file_bytes(tone())] * 2 + [{"format": "features"}]


def test_an_error_of_the_processor_itself_is_passed_on():
    async def processor(*_args):
        raise KeyError("own")

    request = SimpleNamespace(audio_data=[b""])
    with pytest.raises(KeyError, match="own"):
        asyncio.run(check_audio_landed(processor, processor_of(), [], "", request))


def test_clips_of_clients_are_brought_into_the_models_form_and_those_of_sessions_are_not():
    form = {"before_s": 0.3, "after_s": 0.5, "least_peak": 0.03}
    own = file_bytes(tone())
    url = "data:audio/wav;base64," + base64.b64encode(own).decode()
    request = SimpleNamespace(audio_data=[own, url])

    async def processor(*_args):
        return SimpleNamespace(mm_items=[item("audio", [(1, 2)] * 2)])

    asked = check_audio_landed(processor, processor_of(live_clip_form=form), [], "", request)
    asyncio.run(asked)
    given, formed = map(load_audio, request.audio_data)
    assert request.audio_data[0] == own
    assert len(formed) == len(given) + 0.8 * RATE_HZ
    assert not formed[: int(0.3 * RATE_HZ)].any() and not formed[-int(0.5 * RATE_HZ) :].any()
    request = SimpleNamespace(audio_data=[url])
    processor = processor_of(live_clip_form=form)
    asyncio.run(check_audio_landed(processor_of_one, processor, [], "", request))
    assert len(load_audio(request.audio_data[0])) == len(formed)


async def processor_of_one(*_args):
    return SimpleNamespace(mm_items=[item("audio", [(1, 2)])])


def test_the_longest_clip_may_be_brought_into_its_form():
    form = {"before_s": 0.3, "after_s": 0.5, "least_peak": 0.03}
    samples = np.full(int(MAX_CLIP_S) * RATE_HZ, 8000, np.int16)
    samples[::2] *= -1
    url = "data:audio/flac;base64," + base64.b64encode(file_bytes(samples, format="FLAC")).decode()
    request = SimpleNamespace(audio_data=[url])
    processor = processor_of(live_clip_form=form)
    asyncio.run(check_audio_landed(processor_of_one, processor, [], "", request))
    assert len(load_audio(request.audio_data[0])) == len(samples) + 0.8 * RATE_HZ
