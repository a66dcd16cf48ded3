"""Request ids in SGLang's tokenizer manager: a refused batch leaves no state."""

from types import SimpleNamespace

import pytest

tokenizer_manager = pytest.importorskip("sglang.srt.managers.tokenizer_manager")

from sglang.srt.managers.io_struct import GenerateReqInput  # noqa: E402

from sglang_live.bridge.scheduler.request_states import all_or_none  # noqa: E402

UPSTREAM = tokenizer_manager.TokenizerManager._init_req_state


def manager(*running: str) -> SimpleNamespace:
    return SimpleNamespace(
        rid_to_state=dict.fromkeys(running), enable_trace=False, disaggregation_mode=None
    )


def batch(*names: str) -> GenerateReqInput:
    request = GenerateReqInput(
        text=["x"] * len(names), rid=list(names), sampling_params={"max_new_tokens": 1}
    )
    request.normalize_batch_and_arguments()
    return request


def test_upstream_keeps_the_states_it_created_before_it_refuses():
    """When this fails, the seam can go."""
    paused = manager("b")
    with pytest.raises(ValueError, match="Duplicate"):
        UPSTREAM(paused, batch("a", "b"))
    assert set(paused.rid_to_state) == {"a", "b"}


@pytest.mark.parametrize("names", [("a", "b"), ("b",), ("a", "c", "b")])
def test_a_batch_with_an_id_in_use_creates_no_state(names):
    paused = manager("b")
    with pytest.raises(ValueError, match="Duplicate request ID detected: b"):
        all_or_none(UPSTREAM, paused, batch(*names))
    assert set(paused.rid_to_state) == {"b"}


def test_an_id_that_occurs_twice_creates_no_state():
    paused = manager()
    with pytest.raises(ValueError, match="Duplicate"):
        all_or_none(UPSTREAM, paused, SimpleNamespace(rid=["a", "b", "a"]))
    assert not paused.rid_to_state


def test_a_batch_of_unused_ids_creates_all_states():
    paused = manager("c")
    all_or_none(UPSTREAM, paused, batch("a", "b"))
    assert set(paused.rid_to_state) == {"a", "b", "c"}
