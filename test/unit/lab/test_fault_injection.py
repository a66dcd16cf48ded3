from types import SimpleNamespace

import pytest

from lab import fault_injection
from lab.fault_injection import FAULT_ENV, FaultInjection
from sglang_live.bridge.scheduler.part import Part
from sglang_live.engine_channel.inbox import STAGE_ENV


def batch(*prompts: list[int]) -> SimpleNamespace:
    return SimpleNamespace(reqs=[SimpleNamespace(origin_input_ids=prompt) for prompt in prompts])


def test_a_prompt_with_the_ids_in_sequence_ends_the_thinker(monkeypatch):
    monkeypatch.setenv(STAGE_ENV, "thinker")
    monkeypatch.setenv(FAULT_ENV, fault_injection.environment("die", [5, 6])[FAULT_ENV])
    part = fault_injection.part(None)
    part.before_launch(batch([1, 5, 7, 6], [6, 5], []))
    with pytest.raises(RuntimeError, match="ids of the fault"):
        part.before_launch(batch([1], [4, 5, 6, 7]))


def test_no_other_engine_has_the_fault(monkeypatch):
    monkeypatch.setenv(STAGE_ENV, "talker")
    assert type(fault_injection.part(None)) is Part


def test_another_action_is_refused(monkeypatch):
    monkeypatch.setenv(FAULT_ENV, "explode:1")
    with pytest.raises(ValueError, match="is die:IDS or hang:IDS"):
        FaultInjection(None)
