"""Claims about the orchestrator under faults that a seed draws: no turn hangs, nothing is left."""

import asyncio
from dataclasses import replace

import pytest

from benchmark.simulate import faults
from benchmark.simulate.faults import Fault, Outcome, Scenario
from sglang_live.extensions.planner.simulation.placement import SHARED
from sglang_live.orchestrator import stage_jobs
from sglang_live.orchestrator.sessions import VoiceSession
from sglang_live.stages.transport.client import Job

# Among them each kind of fault, each arm, one and two replicas.
SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_turn_ends_and_nothing_is_left(seed):
    assert faults.run(Scenario.draw(seed)).wrong == []


def test_the_seeds_have_every_kind_of_fault_and_of_end():
    drawn = [Scenario.draw(seed) for seed in SEEDS]
    assert {fault.kind for one in drawn for fault in one.faults} == {*faults.KINDS}
    assert {one.arm for one in drawn} == {*faults.ARMS}
    assert {one.placement for one in drawn} == {*faults.PLACEMENTS}


@pytest.mark.parametrize("seed", [0, 7])
def test_a_seed_is_replayed_event_by_event(seed):
    first, again = (faults.run(Scenario.draw(seed)) for _ in range(2))
    assert len(first.trace) > 50
    assert first.trace == again.trace


def faulty(kind: str, *, for_s: float = 2.0, which: int = 0) -> Scenario:
    fault = Fault(kind=kind, at_s=6.0, for_s=for_s, which=which)
    return Scenario(seed=2, arm="all", placement=SHARED, n_users=4, barge_in=0.5, faults=(fault,))


@pytest.fixture(scope="module")
def quiet() -> Outcome:
    return faults.run(replace(faulty("death"), faults=()))


@pytest.mark.parametrize("kind", sorted({*faults.KINDS}))
def test_a_fault_changes_the_run_and_leaves_nothing(kind, quiet):
    # Orders are asked rarely, so that the loss of their answers has to last.
    found = faults.run(faulty(kind, for_s=20.0))
    assert found.wrong == quiet.wrong == []
    assert found.trace != quiet.trace


def test_a_link_that_never_answers_ends_the_turn_by_the_limit_of_silence():
    found = faults.run(faulty("stall", for_s=60.0))
    assert found.wrong == [] and found.statuses["failed"] > 0


# --- that the checks find what they look for ---


def test_a_session_that_is_not_closed_in_the_stages_is_found(monkeypatch):
    monkeypatch.setattr("sglang_live.orchestrator.stage_links.StageLinks.close", lambda self: None)
    assert any("sessions" in text for text in faults.run(faulty("vanish")).wrong)


def test_a_job_that_stays_with_its_client_is_found(monkeypatch):
    monkeypatch.setattr(
        "sglang_live.stages.transport.client.JobClient.forget", lambda self, job: None
    )
    assert any("client's jobs" in text for text in faults.run(faulty("vanish")).wrong)


def test_a_job_that_goes_on_after_its_turn_is_found(monkeypatch):
    monkeypatch.setattr(Job, "_stop_stage", lambda self: None)
    assert faults.run(faulty("vanish")).wrong != []


def test_a_turn_without_limit_of_silence_is_found(monkeypatch):
    monkeypatch.setattr(stage_jobs, "THINKER_SILENCE_LIMIT_S", None)
    found = faults.run(faulty("stall", for_s=faults._RUN_S))
    assert any("no end" in text or "took" in text for text in found.wrong)


def test_a_session_that_is_not_closed_is_found(monkeypatch):
    async def stays(self: VoiceSession) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(VoiceSession, "close", stays)
    assert any(text.startswith("left: sessions") for text in faults.run(faulty("vanish")).wrong)
