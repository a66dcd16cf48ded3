"""With every policy off the thinker's engine runs SGLang's own scheduling loop."""

from sglang_live.bridge.seams import all_seams

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
    targets = {seam.target for seam in all_seams() if seam.needed("thinker", on_cpu=True)}
    loop = {f"sglang.srt.managers.scheduler.{name}" for name in LOOP}
    assert not targets & loop


def test_the_talker_replaces_the_scheduler_for_its_text_gate_alone():
    [seam] = [s for s in all_seams() if s.target == "sglang.srt.managers.scheduler.Scheduler"]
    assert seam.stages == ("talker",)
