import pytest

from benchmark.load.talker_frames import FrameCount, talker_frames, waste


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


def test_frames_are_those_of_all_talkers():
    assert talker_frames(metrics(100.0, 1.5e3)) == 1600
    assert talker_frames(metrics()) is None


def test_what_was_generated_before_the_load_does_not_count():
    assert counted(metrics(40), metrics(540)) == 500


def test_the_first_ping_may_be_late():
    assert counted("", metrics(0), metrics(500)) == 500


def test_a_server_that_does_not_tell_or_began_anew_has_no_number():
    assert counted("", "") is None
    assert counted(metrics(500), metrics(20)) is None


def test_waste_is_what_nobody_heard_of_what_was_generated():
    # 100 frames of 80 ms are 8 s.
    assert waste(6.0, 100) == pytest.approx(0.25)
    assert waste(6.0, None) is None
    assert waste(0.0, 0) is None
