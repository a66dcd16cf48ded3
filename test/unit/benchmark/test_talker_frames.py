from benchmark.load.talker_frames import FrameCount, talker_frames


def metrics(*frames: float) -> str:
    lines = ["# TYPE sglang_live_stage_load gauge"]
    for replica, value in enumerate(frames):
        labels = f'replica="{replica}",stage="talker",what='
        lines.append(f'sglang_live_stage_load{{{labels}"frames"}} {value}')
        lines.append(f'sglang_live_stage_load{{{labels}"jobs"}} 7.0')
    lines.append('sglang_live_stage_load{replica="0",stage="thinker",what="frames"} 9.0')
    return "\n".join(lines) + "\n"


def counted(*texts: str) -> int | None:
    answers = iter(texts)
    count = FrameCount(lambda: next(answers), sleep=lambda _s: None)
    count.begin()
    return count.end()


def test_frames_of_all_talkers_are_summed():
    assert talker_frames(metrics(100.0, 1.5e3)) == 1600
    assert talker_frames(metrics()) is None


def test_frames_generated_before_the_load_do_not_count():
    assert counted(metrics(40), metrics(540)) == 500


def test_the_first_ping_may_be_late():
    assert counted("", metrics(0), metrics(500)) == 500


def test_a_server_without_the_metric_or_a_restarted_one_has_no_count():
    assert counted("", "") is None
    assert counted(metrics(500), metrics(20)) is None
