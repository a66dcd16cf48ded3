"""The talker's prompt as ids: an id determines the embedding at its position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sglang_live.models.speech_lm.talker_ids import TalkerIds

PAD = 5
IDS = TalkerIds(codec_vocab=3072, text_vocab=1024)
INT32_MAX = 2**31 - 1
rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.just(3)),
    elements=st.floats(-4, 4, width=32),
)


@given(codec=st.integers(1, 50), text=st.integers(1, 50))
def test_the_ranges_of_ids_do_not_overlap(codec, text):
    ids = TalkerIds(codec, text)
    ranges = [
        range(codec),
        range(ids.text, ids.text + text),
        range(ids.start, ids.start + text),
        range(ids.pad, ids.pad + codec),
        range(ids.bos, ids.bos + 1),
        range(ids.audio, ids.audio + 100),
    ]
    everything = [i for part in ranges for i in part]
    assert sorted(everything) == list(range(len(everything)))


def audio_keys(states: np.ndarray, ids: TalkerIds = IDS) -> list[int]:
    return ids.user_segment([PAD] * len(states), {PAD}, states)


@settings(max_examples=60)
@given(rows)
def test_audio_keys_are_equal_for_equal_audio_and_differ_from_any_other_id(states):
    keys = audio_keys(states)
    assert keys == audio_keys(np.asfortranarray(states.copy()))
    assert len(set(keys)) == len(states)
    assert all(IDS.audio <= key < INT32_MAX for key in keys)


@settings(max_examples=60)
@given(rows, st.data())
def test_a_clip_that_differs_anywhere_has_other_keys_everywhere(states, data):
    changed = states.copy()
    at = tuple(data.draw(st.integers(0, size - 1)) for size in states.shape)
    changed[at] += 8
    assert not set(audio_keys(states)) & set(audio_keys(changed))


def test_keys_stay_in_their_range_when_the_count_overflows():
    ids = TalkerIds(codec_vocab=2**30 - 7, text_vocab=1)
    space = INT32_MAX - ids.audio
    assert 0 < space < 16
    keys = audio_keys(np.ones((space, 3), np.float32), ids)
    assert sorted(keys) == list(range(ids.audio, INT32_MAX))


def test_a_segment_keeps_text_in_place_and_has_one_key_per_audio_position():
    states = np.arange(6, dtype=np.float32).reshape(2, 3)
    segment = IDS.user_segment([7, PAD, 8, PAD, 9], {PAD}, states)
    first, second = audio_keys(states)
    assert segment == [IDS.text + 7, first, IDS.text + 8, second, IDS.text + 9]


@pytest.mark.parametrize("n_rows", [None, 0, 1, 3])
def test_states_must_match_the_audio_positions(n_rows):
    states = None if n_rows is None else np.zeros((n_rows, 3), np.float32)
    with pytest.raises(ValueError, match=f"2 placeholders, {n_rows or 0} hidden states"):
        IDS.user_segment([1, PAD, PAD], {PAD}, states)


def test_a_segment_without_audio_needs_no_states():
    assert IDS.user_segment([1, 2], {PAD}, None) == [IDS.text + 1, IDS.text + 2]


def test_a_response_begins_with_role_controls_speaker_and_first_word(demo_spec):
    spec = demo_spec
    ids = TalkerIds(spec.codec_vocab, spec.thinker_vocab)
    role = [spec.im_start_id, spec.assistant_id, 211]
    codes = [spec.codec_nothink_id, spec.codec_think_bos_id, spec.codec_think_eos_id, 2302]
    assert ids.response_prefix(role, codes, first=77) == [
        ids.text + demo_spec.im_start_id,
        ids.text + demo_spec.assistant_id,
        ids.text + 211,
        ids.pad + demo_spec.codec_nothink_id,
        ids.pad + demo_spec.codec_think_bos_id,
        ids.pad + demo_spec.codec_think_eos_id,
        ids.pad + 2302,
        ids.bos,
        ids.start + 77,
    ]
