"""Counters of a modelled device, from the text of /metrics."""

from benchmark.load.device_times import device_table, device_times, grown

LINE = 'sglang_live_stage_load{{replica="{}",stage="{}",what="{}"}} {}\n'


def metrics(*rows) -> str:
    return "# HELP sglang_live_stage_load x\n" + "".join(LINE.format(*row) for row in rows)


def test_counters_of_a_stages_replicas_are_summed_and_others_left_out():
    text = metrics(
        (0, "talker", "device_batches", 10.0),
        (1, "talker", "device_batches", 5.0),
        (0, "talker", "frames", 99.0),
        (0, "vocoder", "device_late_s", 0.5),
    )
    found = {"talker": {"batches": 15.0}, "vocoder": {"late_s": 0.5}}
    assert device_times(text) == found
    before = {"talker": {"batches": 4.0}}
    assert grown(before, found) == {"talker": {"batches": 11.0}, "vocoder": {"late_s": 0.5}}


def test_without_a_modelled_device_there_is_no_table():
    assert device_times(metrics((0, "talker", "frames", 1.0))) == {}
    assert device_table([{}, {}]) is None


def test_the_table_tells_by_how_much_results_were_late():
    counters = {"batches": 5.0, "late_batches": 1.0, "late_s": 0.5, "modelled_s": 10.0}
    text = device_table([{"talker": counters}, {"talker": counters}])
    assert "10 batches of    20.0 s" in text
    assert "late      2 by    1.0 s in all,   5.0 %" in text
