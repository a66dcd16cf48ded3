"""Claims about the classes that request ids tell."""

import pytest

from sglang_live.ids import is_best_effort


@pytest.mark.parametrize("rid", ["batch-0f3a", "batch-by1764201600-7", "flex-speak-1"])
def test_batches_and_flex_speech_are_best_effort(rid):
    assert is_best_effort(rid)


@pytest.mark.parametrize("rid", ["speak-1", "think-1", "text-1", "prefill-1", "0f3a", "a-batch-1"])
def test_other_requests_are_not(rid):
    assert not is_best_effort(rid)
