"""Turn boundaries from scripted probabilities, then from real audio through the real model."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from sglang_live.interaction.silero import CONTEXT_SAMPLES, WINDOW_SAMPLES, SileroModel, SpeechState
from sglang_live.interaction.vad import (
    SpeechDetector,
    SpeechDismissed,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    VadSettings,
)

AUDIO = Path(__file__).parents[2] / "data" / "audio"
SPEECH = ("sp_jfk", "sp_librivox_0880", "sp_cv651325")
WINDOW_MS = 32
RATE_HZ = 16_000


class ScriptedModel:
    """Returns scripted probabilities, one per window."""

    def __init__(self, probabilities):
        self.probabilities_left = list(probabilities)
        self.windows = []

    def initial_state(self):
        return SpeechState(np.zeros(1), np.zeros(1))

    def score(self, asked):
        ((windows, state),) = asked
        self.windows += list(windows)
        taken = [self.probabilities_left.pop(0) for _ in windows]
        return [(np.array(taken, np.float32), state)]


def run(probabilities, settings=None, sizes=None):
    model = ScriptedModel(probabilities)
    detector = SpeechDetector(model, settings or VadSettings())
    n_samples = len(probabilities) * WINDOW_SAMPLES
    events = []
    for size in sizes or [n_samples]:
        events += detector.feed(np.zeros(size, np.int16))
    return events


def test_a_turn_spans_from_the_padded_onset_to_the_end_of_the_silence():
    script = [0.0] * 20 + [0.9] * 10 + [0.0] * 20
    started, stopped = run(script)
    onset_ms = 20 * WINDOW_MS
    assert started == SpeechStarted(at_ms=onset_ms - 300, onset_ms=onset_ms)
    assert stopped == SpeechStopped(at_ms=30 * WINDOW_MS + 500, speech_end_ms=30 * WINDOW_MS)


def test_the_padding_reaches_neither_before_the_stream_nor_into_the_turn_before():
    settings = VadSettings(silence_duration_ms=64)
    script = [0.9] * 5 + [0.0] * 3 + [0.9] * 5
    first, stopped, second = run(script, settings)
    assert first.at_ms == 0
    assert second.at_ms == stopped.at_ms


@pytest.mark.parametrize("n_voiced", [1, 2])
def test_less_than_the_minimum_of_speech_starts_nothing(n_voiced):
    assert run(([0.0] * 5 + [0.9] * n_voiced) * 10 + [0.0] * 5) == []


def test_a_soft_syllable_within_the_hysteresis_band_does_not_end_the_turn():
    # 0.4 is below the threshold of 0.5, but not by 0.15.
    assert len(run([0.9] * 5 + [0.4] * 60)) == 1
    assert len(run([0.9] * 5 + [0.34] * 60)) == 2


def test_a_pause_shorter_than_the_silence_keeps_one_turn():
    script = [0.9] * 5 + [0.0] * 15 + [0.9] * 5 + [0.0] * 16
    assert [type(event) for event in run(script)] == [SpeechStarted, SpeechStopped]


def test_half_voiced_noise_does_not_move_the_onset_back():
    # Single voiced windows far apart are not the beginning of what comes later.
    script = [0.9, 0.4, 0.4, 0.4] * 10 + [0.9] * 5
    (started,) = run(script)
    assert started.onset_ms == 40 * WINDOW_MS


@pytest.mark.parametrize("size", [1, 100, 511, 512, 513, 5000])
def test_the_size_of_the_appends_does_not_matter(size):
    script = [0.0] * 7 + [0.8] * 9 + [0.0] * 30
    total = len(script) * WINDOW_SAMPLES
    sizes = [size] * (total // size) + [total % size]
    assert run(script, sizes=sizes) == run(script)


class EagerDetector(SpeechDetector):
    """Scores every window at once."""

    def _windows_to_event(self):
        return 1


@given(
    probabilities=st.lists(
        st.tuples(st.sampled_from((0.0, 0.4, 0.9)), st.integers(1, 9)), min_size=1, max_size=12
    ),
    confirming=st.lists(st.booleans(), min_size=1, max_size=5),
    settings=st.builds(
        VadSettings,
        silence_duration_ms=st.sampled_from((0, 20, 200, 500)),
        min_speech_ms=st.sampled_from((0, 32, 96, 150)),
        confirm_ms=st.sampled_from((0, 100, 250)),
        pause_ms=st.sampled_from((None, 60, 200)),
    ),
    size=st.sampled_from((320, 512, 700, 4000)),
)
def test_no_event_comes_later_for_windows_that_were_left(probabilities, confirming, settings, size):
    script = [probability for probability, n in probabilities for _ in range(n)]
    lazy = SpeechDetector(ScriptedModel(script), settings)
    eager = EagerDetector(ScriptedModel(script), settings)
    confirmations = itertools.cycle(confirming)
    was_confirming = next(confirmations)
    for begin in range(0, len(script) * WINDOW_SAMPLES, size):
        chunk = np.zeros(min(size, len(script) * WINDOW_SAMPLES - begin), np.int16)
        lazy.confirming = eager.confirming = was_confirming
        events = eager.feed(chunk)
        assert lazy.feed(chunk) == events
        # A response begins or ceases to be audible, but not while windows are left.
        if events:
            was_confirming = next(confirmations)
    assert lazy.speaking == eager.speaking
    if eager.speaking:
        assert lazy.force_stop("client") == eager.force_stop("client")


def test_a_turn_that_new_settings_have_ended_is_stopped_where_they_say():
    detector = SpeechDetector(ScriptedModel([0.9] * 4 + [0.0] * 3), VadSettings())
    detector.feed(np.zeros(4 * WINDOW_SAMPLES, np.int16))
    detector.feed(np.zeros(3 * WINDOW_SAMPLES, np.int16))  # left: 500 ms end a turn
    detector.settings = VadSettings(silence_duration_ms=40)
    stopped = detector.force_stop("too_long")
    assert stopped == SpeechStopped(at_ms=4 * 32 + 40, speech_end_ms=4 * 32, reason="silence")
    assert not detector.speaking


def test_a_turn_that_is_ended_from_outside_has_the_reason():
    detector = SpeechDetector(ScriptedModel([0.9] * 4), VadSettings())
    detector.feed(np.zeros(4 * WINDOW_SAMPLES, np.int16))
    stopped = detector.force_stop("too_long")
    assert stopped == SpeechStopped(at_ms=4 * 32, speech_end_ms=4 * 32, reason="too_long")


def test_windows_are_left_while_they_can_bring_no_event():
    model = ScriptedModel([0.0] * 30)
    n_calls = 0
    score = model.score

    def counted(asked):
        nonlocal n_calls
        n_calls += 1
        return score(asked)

    model.score = counted
    detector = SpeechDetector(model, VadSettings(min_speech_ms=96))
    for _ in range(30):
        detector.feed(np.zeros(WINDOW_SAMPLES, np.int16))
    assert (n_calls, len(model.windows)) == (10, 30)


def test_windows_carry_the_end_of_the_one_before():
    model = ScriptedModel([0.0] * 4)
    detector = SpeechDetector(model, VadSettings())
    pcm = np.arange(4 * WINDOW_SAMPLES).astype(np.int16)
    for chunk in np.split(pcm, [300, 700, 1500]):
        detector.feed(chunk)
    with_silence = np.concatenate((np.zeros(CONTEXT_SAMPLES, np.int16), pcm)) / 32768
    for index, window in enumerate(model.windows):
        at = index * WINDOW_SAMPLES
        expected = with_silence[at : at + CONTEXT_SAMPLES + WINDOW_SAMPLES]
        assert np.allclose(window, expected)


def test_time_goes_on_across_a_reset():
    model = ScriptedModel([0.9] * 20)
    detector = SpeechDetector(model, VadSettings())
    detector.feed(np.zeros(5 * WINDOW_SAMPLES, np.int16))
    assert detector.speaking
    detector.reset(RATE_HZ)
    assert not detector.speaking
    (started,) = detector.feed(np.zeros(5 * WINDOW_SAMPLES, np.int16))
    assert started == SpeechStarted(at_ms=1000, onset_ms=1000)


def test_settings_outside_their_range_are_refused():
    for wrong in (
        {"threshold": 1.1},
        {"silence_duration_ms": -1},
        {"min_speech_ms": -5},
        {"confirm_ms": -1},
    ):
        with pytest.raises(ValueError):
            VadSettings(**wrong)


@pytest.fixture(scope="module")
def silero():
    return SileroModel()


def load(name):
    pcm, rate_hz = soundfile.read(AUDIO / f"{name}.flac", dtype="int16")
    assert rate_hz == RATE_HZ
    return pcm


def onset_sample(pcm):
    """Where the voice rises above a fifth of its loudest 10 ms: above breath and mouth clicks."""
    frames = pcm[: len(pcm) // 160 * 160].reshape(-1, 160).astype(float)
    loudness = np.sqrt((frames**2).mean(axis=1))
    return int(np.argmax(loudness > loudness.max() / 5)) * 160


def detect(model, pcm, settings=None, chunk=320):
    detector = SpeechDetector(model, settings or VadSettings())
    return [e for at in range(0, len(pcm), chunk) for e in detector.feed(pcm[at : at + chunk])]


@pytest.mark.parametrize("name", SPEECH)
@pytest.mark.parametrize("lead_ms", [0, 500, 1017])
def test_real_speech_is_found_within_200_ms_of_its_onset(silero, name, lead_ms):
    clip = load(name)
    clip = clip[onset_sample(clip) :]
    pcm = np.concatenate((np.zeros(lead_ms * 16, np.int16), clip, np.zeros(RATE_HZ, np.int16)))
    events = detect(silero, pcm)
    assert isinstance(events[0], SpeechStarted)
    assert abs(events[0].onset_ms - lead_ms) <= 200
    assert events[0].at_ms == max(0, events[0].onset_ms - 300)
    assert isinstance(events[-1], SpeechStopped)
    kinds = [type(event) for event in events]
    assert kinds == [SpeechStarted, SpeechStopped] * (len(kinds) // 2)


@pytest.mark.parametrize("name", SPEECH)
def test_quieter_or_noisier_speech_is_still_found(silero, name):
    rng = np.random.default_rng(0)
    clip = load(name).astype(float)
    level = np.sqrt((clip**2).mean())
    for gain, noise in ((0.1, 0.0), (1.0, 0.1)):
        pcm = clip * gain + rng.normal(0, noise * level * gain, len(clip)) + 0.5
        assert detect(silero, np.clip(pcm, -32768, 32767).astype(np.int16))


def silences():
    rng = np.random.default_rng(7)
    t = np.arange(10 * RATE_HZ) / RATE_HZ
    click = rng.normal(0, 20, len(t))
    click[:: RATE_HZ // 2] = 20_000
    return {
        "digital_zero": np.zeros(len(t)),
        "one_bit": rng.integers(-1, 2, len(t)),
        "offset": np.full(len(t), 900),
        "noise_-60_dB": rng.normal(0, 33, len(t)),
        "noise_-40_dB": rng.normal(0, 330, len(t)),
        "hum": 1500 * np.sin(2 * np.pi * 50 * t),
        "tone": 8000 * np.sin(2 * np.pi * 440 * t),
        "clicks": click,
    }


@pytest.mark.parametrize("name", sorted(silences()))
def test_silence_noise_and_clicks_never_start_a_turn(silero, name):
    pcm = silences()[name].astype(np.int16)
    assert detect(silero, pcm) == []
    assert detect(silero, pcm, VadSettings(threshold=0.3)) == []


def test_loud_animals_do_not_start_a_turn(silero):
    assert detect(silero, load("no_humpback_6s")) == []


def test_detectors_that_share_the_model_do_not_affect_each_other(silero):
    one, other = load("sp_librivox_0880"), load("no_humpback_6s")[: 3 * RATE_HZ]
    alone = detect(silero, one)
    first = SpeechDetector(silero, VadSettings())
    second = SpeechDetector(silero, VadSettings())
    mixed = []
    for at in range(0, len(one), 320):
        mixed += first.feed(one[at : at + 320])
        assert second.feed(other[at : at + 320]) == []
    assert mixed == alone


def run_confirming(probabilities, **settings):
    model = ScriptedModel(probabilities)
    detector = SpeechDetector(model, VadSettings(**settings))
    detector.confirming = True
    return detector.feed(np.zeros(len(probabilities) * WINDOW_SAMPLES, np.int16)), detector


def test_while_confirming_a_voice_is_suspected_first_and_started_when_it_lasts():
    events, detector = run_confirming([0.0] * 10 + [0.9] * 7)
    onset_ms = 10 * WINDOW_MS
    assert events == [SpeechSuspected(onset_ms)]
    assert not detector.speaking
    detector._model.probabilities_left = [0.9]
    started = detector.feed(np.zeros(WINDOW_SAMPLES, np.int16))
    # The turn begins where the voice began, not where it was confirmed.
    assert started == [SpeechStarted(at_ms=onset_ms - 300, onset_ms=onset_ms)]
    assert detector.speaking


def test_a_voice_that_ceases_before_it_is_confirmed_is_dismissed():
    events, detector = run_confirming([0.0] * 10 + [0.9] * 5 + [0.0] * 7)
    assert events == [SpeechSuspected(320), SpeechDismissed(320, 480)]
    detector._model.probabilities_left = [0.9] * 3
    assert detector.feed(np.zeros(3 * WINDOW_SAMPLES, np.int16)) == [SpeechSuspected(22 * 32)]


def test_a_voice_that_must_outlast_another_one_starts_later():
    detector = SpeechDetector(ScriptedModel([0.9] * 20), VadSettings())
    detector.confirming = True

    def hear(n_windows):
        detector.take(np.zeros(n_windows * WINDOW_SAMPLES, np.int16))
        windows, state = detector.due()
        [(scores, state)] = detector._model.score([(windows, state)])
        return detector.scored(scores, state, outlast_ms=480)

    assert hear(14) == [SpeechSuspected(0)]
    assert detector.onset_sample == 0
    assert hear(1) == [SpeechStarted(0, 0)]
    assert detector.onset_sample is None


def test_a_dismissed_voice_can_be_recalled_until_the_user_speaks_again():
    events, detector = run_confirming([0.0] * 10 + [0.9] * 5 + [0.0] * 7)
    started, stopped = detector.recall(events[-1])
    assert started == SpeechStarted(at_ms=320 - 300, onset_ms=320)
    assert stopped == SpeechStopped(480 + 200, 480, "words")
    # It is a turn now, and none of two.
    assert detector.recall(events[-1]) is None


def test_a_dismissed_voice_is_not_recalled_while_the_user_speaks():
    events, detector = run_confirming([0.9] * 5 + [0.0] * 7)
    detector._model.probabilities_left = [0.9] * 9
    assert isinstance(detector.feed(np.zeros(9 * WINDOW_SAMPLES, np.int16))[-1], SpeechStarted)
    assert detector.recall(events[-1]) is None


def test_a_pause_within_a_word_does_not_dismiss_and_does_not_count_as_voice():
    script = [0.9] * 4 + [0.0] * 5 + [0.9] * 3
    events, detector = run_confirming(script)
    assert events == [SpeechSuspected(0)]
    detector._model.probabilities_left = [0.9]
    (started,) = detector.feed(np.zeros(WINDOW_SAMPLES, np.int16))
    assert started == SpeechStarted(at_ms=0, onset_ms=0)


@pytest.mark.parametrize("confirm_ms", [0, 96])
def test_confirm_ms_up_to_the_minimum_of_speech_has_no_effect(confirm_ms):
    events, _ = run_confirming([0.9] * 5, confirm_ms=confirm_ms)
    assert [type(event) for event in events] == [SpeechStarted]


def test_a_suspicion_becomes_a_start_when_no_response_is_audible_any_more():
    events, detector = run_confirming([0.9] * 4)
    assert events == [SpeechSuspected(0)]
    detector.confirming = False
    detector._model.probabilities_left = [0.9]
    assert isinstance(detector.feed(np.zeros(WINDOW_SAMPLES, np.int16))[0], SpeechStarted)


def test_a_reset_drops_a_suspicion():
    _, detector = run_confirming([0.9] * 4)
    detector.reset(4 * WINDOW_SAMPLES)
    detector._model.probabilities_left = [0.0] * 10
    assert detector.feed(np.zeros(10 * WINDOW_SAMPLES, np.int16)) == []


@pytest.mark.parametrize("name", SPEECH)
def test_real_speech_over_a_response_is_confirmed_within_half_a_second(silero, name):
    clip = load(name)
    clip = clip[onset_sample(clip) :]
    detector = SpeechDetector(silero, VadSettings())
    detector.confirming = True
    events = detector.feed(np.concatenate((np.zeros(RATE_HZ // 2, np.int16), clip[:RATE_HZ])))
    kinds = [type(event) for event in events]
    assert kinds[:2] == [SpeechSuspected, SpeechStarted]


# --- pauses ---


def test_a_pause_is_one_event_and_the_turn_goes_on():
    settings = VadSettings(silence_duration_ms=2000, pause_ms=200)
    model = ScriptedModel([0.9] * 10 + [0.0] * 20 + [0.9] * 5 + [0.0] * 20)
    detector = SpeechDetector(model, settings)
    events = detector.feed(np.zeros(55 * WINDOW_SAMPLES, np.int16))
    kinds = [SpeechStarted, SpeechPaused, SpeechResumed, SpeechPaused]
    assert [type(event) for event in events] == kinds
    _, first, resumed, second = events
    assert resumed.silence_ms == 20 * WINDOW_MS
    assert first.at_ms - first.speech_end_ms == pytest.approx(200, abs=WINDOW_MS)
    assert not detector.is_in(first) and detector.is_in(second)
    assert detector.wait(first, 0) is None
    stopped = detector.wait(second, 200)
    assert stopped.speech_end_ms == second.speech_end_ms and stopped.reason == "verdict"
    assert not detector.speaking and detector.wait(second, 0) is None


def paused_detector(windows_after: list[float]) -> tuple[SpeechDetector, SpeechPaused]:
    """A detector in a pause of 224 ms, whose silence of 2 s ends turns."""
    settings = VadSettings(silence_duration_ms=2000, pause_ms=200)
    model = ScriptedModel([0.9] * 10 + [0.0] * 7 + windows_after)
    detector = SpeechDetector(model, settings)
    [_, pause] = detector.feed(np.zeros(17 * WINDOW_SAMPLES, np.int16))
    return detector, pause


@pytest.mark.parametrize(("wait_ms", "n_windows"), [(320, 3), (640, 13), (2560, 73)])
def test_a_pause_may_have_a_silence_of_its_own(wait_ms, n_windows):
    detector, pause = paused_detector([0.0] * 80)
    assert detector.wait(pause, wait_ms) is None
    assert detector.feed(np.zeros((n_windows - 1) * WINDOW_SAMPLES, np.int16)) == []
    [stopped] = detector.feed(np.zeros(WINDOW_SAMPLES, np.int16))
    assert stopped.at_ms - stopped.speech_end_ms == wait_ms and stopped.reason == "verdict"


def test_the_silence_of_a_pause_is_not_that_of_the_next():
    detector, pause = paused_detector([0.9] * 3 + [0.0] * 80)
    assert detector.wait(pause, 300) is None
    events = detector.feed(np.zeros(75 * WINDOW_SAMPLES, np.int16))
    assert [type(event) for event in events] == [SpeechResumed, SpeechPaused, SpeechStopped]
    assert events[-1].at_ms - events[-1].speech_end_ms == 2000
    assert events[-1].reason == "silence"


def test_without_pause_ms_there_are_no_pauses():
    assert [type(event) for event in run([0.9] * 10 + [0.0] * 12)] == [SpeechStarted]
