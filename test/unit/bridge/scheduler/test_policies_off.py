"""With every policy off the thinker's engine runs SGLang's own scheduling loop."""

from sglang_live.bridge.seams import all_seams
from sglang_live.engine_channel.inbox import POLICIES_ENV, policies_from_env
from sglang_live.policy.policies import Policies

# What the event loops of Scheduler call each round.
LOOP = (
    "Scheduler",
    "Scheduler.event_loop_normal",
    "Scheduler.event_loop_overlap",
    "Scheduler.ingest_requests",
    "Scheduler.get_next_batch_to_run",
    "Scheduler.get_new_batch_prefill",
    "Scheduler.update_running_batch",
    "Scheduler.run_batch",
    "Scheduler.process_batch_result",
)


def test_no_seam_of_the_thinker_is_in_the_scheduling_loop():
    loop = {f"sglang.srt.managers.scheduler.{name}" for name in LOOP}
    assert not targets(()) & loop
    assert targets(("urgency",)) & loop


def test_with_policies_off_the_talkers_scheduler_takes_no_decisions(monkeypatch):
    monkeypatch.delenv(POLICIES_ENV, raising=False)
    assert not policies_from_env().decides_rounds
    assert not Policies(truncate=True).decides_rounds
    assert Policies(pacing=True, truncate=True).decides_rounds


def targets(policies: tuple[str, ...]) -> set[str]:
    on = Policies.parse(policies)
    return {s.target for s in all_seams() if s.needed("thinker", "cpu", on)}
