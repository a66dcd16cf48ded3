"""The prompts of a round's prefill; the rest of the scheduler needs an engine."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.scheduler.live import audio_within

SPOKEN, WRITTEN = (
    SimpleNamespace(multimodal_inputs=object()),
    SimpleNamespace(multimodal_inputs=None),
)


@pytest.mark.parametrize(
    ("queue", "n_first"),
    [
        ([SPOKEN], 1),
        ([SPOKEN, SPOKEN, SPOKEN], 1),
        ([WRITTEN, SPOKEN, WRITTEN, SPOKEN], 3),
        ([WRITTEN, WRITTEN, WRITTEN], 3),  # upstream slices text itself
        ([], 0),
    ],
)
def test_one_prompt_with_audio_is_admitted_and_others_as_far_as_they_fit(queue, n_first):
    first, rest = audio_within(150, queue, [100] * len(queue))
    assert first + rest == queue and len(first) == n_first
    assert audio_within(100 * len(queue), queue, [100] * len(queue)) == (queue, [])
