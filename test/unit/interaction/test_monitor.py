"""The facts of a session: reports to the stages, user stats, the timeline."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from sglang_live.aio import failed_tasks
from sglang_live.clock import SimClock
from sglang_live.core import FRAME_S
from sglang_live.interaction import timeline as timeline_module
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.playback import ACK_TIMEOUT_S
from sglang_live.interaction.timeline import Timeline
from sglang_live.interaction.user_stats import UserPrior
from sglang_live.orchestrator.turn_control import REPORT_EVERY_S
from sglang_live.telemetry.metrics import GatewayMetrics


class Stages:
    session_id = "s"

    def __init__(self):
        self.reports = []
        self.underruns = []
        self.n_speech = 0
        self.next_uses = []

    def report_playback(self, heard_s, playing, speed):
        self.reports.append((round(heard_s, 3), playing, speed)[: 2 if speed == 1 else 3])

    def report_underrun(self, silent_s):
        self.underruns.append(round(silent_s, 3))

    def watch(self, on_stream_event):
        self.on_stream_event = on_stream_event

    def report_speech(self, speaks=True):
        self.n_speech += 1 if speaks else -1

    def report_next_use(self, to_play_s, response_gap_s, observed_gap_s):
        self.next_uses.append((round(to_play_s, 3), response_gap_s, observed_gap_s))


class World:
    def __init__(self):
        self.clock, self.stages = SimClock(100.0), Stages()
        self.metrics = GatewayMetrics(CollectorRegistry())
        self.timeline = Timeline("s", began_s=100.0, began_unix_s=1.0)
        self.monitor = SessionMonitor(
            self.stages, self.clock, self.metrics, self.timeline, UserPrior()
        )

    def respond(self, response_id="r1", speed=1.0):
        playback = self.monitor.response_created(response_id, speed)
        self.monitor.turn_started(playback)
        return playback

    async def advance(self, seconds):
        for _ in range(3):  # sleepers must have gone to sleep before time moves
            await asyncio.sleep(0)
        self.clock.advance(seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(f"sglang_live_gateway_{name}", labels)

    def events(self, *names):
        events = self.timeline.to_json()["events"]
        return [e for e in events if not names or e["event"] in names]


@pytest.fixture
async def world():
    world = World()
    yield world
    world.monitor.close()


async def test_the_start_of_playback_and_its_running_dry_are_reported(world):
    playback = world.respond()
    assert world.stages.reports == [(0.0, False)]
    world.monitor.audio_sent(playback, 1.0)
    assert world.stages.reports[1:] == [(0.0, True)]
    await world.advance(0.5)
    world.monitor.audio_sent(playback, 0.5)
    await world.advance(0.6)
    # Playing as expected is no news, however much is sent.
    assert len(world.stages.reports) == 2
    await world.advance(0.5)
    assert world.stages.reports[2:] == [(1.5, False)]
    world.monitor.audio_sent(playback, 0.5)
    assert world.stages.reports[3:] == [(1.5, True)]


async def test_an_ack_is_reported_only_if_the_estimate_was_off_by_more_than_a_frame(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 5.0)
    await world.advance(0.7)
    world.monitor.acked(playback, 0.65)
    assert len(world.stages.reports) == 2
    await world.advance(0.7)
    world.monitor.acked(playback, 1.1)
    assert world.stages.reports[2:] == [(1.1, True)]


async def test_reports_are_repeated_while_the_turn_runs_though_nothing_is_wrong(world):
    playback = world.respond()
    await world.advance(10.0)
    assert len(world.stages.reports) == 1, "its consumer has not begun"
    world.monitor.audio_sent(playback, 60.0)
    for n in range(1, 4):
        await world.advance(REPORT_EVERY_S)
        assert world.stages.reports[-1] == (n * REPORT_EVERY_S, True)
    assert len(world.stages.reports) == 5
    world.monitor.turn_ended(playback)
    await world.advance(10.0)
    assert len(world.stages.reports) == 5


async def test_reports_of_a_client_that_has_paused_are_repeated(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 5.0)
    for _ in range(20):
        await world.advance(0.5)
        world.monitor.acked(playback, 0.4)
    paused = [report for report in world.stages.reports if report == (0.4, False)]
    assert 4 <= len(paused) <= 7


async def test_reports_go_on_after_one_that_failed(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 60.0)
    told, n_failed = world.stages.reports, failed_tasks.n_by_name["playback"]
    world.stages.reports = None  # the next report fails
    await world.advance(REPORT_EVERY_S)
    assert failed_tasks.n_by_name["playback"] == n_failed + 1
    world.stages.reports = told
    world.monitor.audio_sent(playback, 1.0)  # as every 0.16 s
    await world.advance(REPORT_EVERY_S)
    assert world.stages.reports[-1] == (2 * REPORT_EVERY_S, True)


async def test_a_paused_client_is_reported_and_so_is_the_end_of_its_acks(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 5.0)
    for _ in range(3):
        await world.advance(0.5)
        world.monitor.acked(playback, 0.4)
    assert world.stages.reports[-1] == (0.4, False)
    await world.advance(ACK_TIMEOUT_S + 0.01)
    assert world.stages.reports[-1][1] is True
    assert world.value("playback_ack_timeouts_total") == 1
    assert len(world.events("ack_timeout")) == 1


async def test_only_the_running_turn_is_reported(world):
    first = world.respond("r1")
    world.monitor.audio_sent(first, 1.0)
    world.monitor.turn_ended(first)
    n_reports = len(world.stages.reports)
    second = world.monitor.response_created("r2")
    await world.advance(1.1)
    assert len(world.stages.reports) == n_reports
    world.monitor.turn_started(second)
    assert world.stages.reports[n_reports:] == [(0.0, False)]


async def test_a_response_behind_another_is_reported_when_its_playback_begins(world):
    first = world.respond("r1")
    world.monitor.audio_sent(first, 1.0)
    world.monitor.all_audio_sent(first)
    second = world.respond("r2")
    world.monitor.audio_sent(second, 1.0)
    assert world.stages.reports[-1] == (0.0, False)
    await world.advance(1.0)
    assert world.stages.reports[-1] == (0.0, True)


async def test_speech_and_suspicion_are_passed_on(world):
    world.monitor.speech_suspected(100.0)
    world.monitor.speech_started(100.0)
    assert world.stages.n_speech == 2
    world.monitor.speech_dismissed("noise", "short")
    assert world.stages.n_speech == 1


async def test_speech_that_goes_on_is_passed_on_every_four_seconds(world):
    world.monitor.speech_started(100.0)
    for _ in range(90):
        await world.advance(0.1)
        world.monitor.speech_continues()
    assert world.stages.n_speech == 3


async def test_user_stats_follow_the_gaps_behind_responses(world):
    user_stats = world.monitor.user_stats
    heard = world.respond("r3")
    world.monitor.audio_sent(heard, 1.0)
    world.monitor.all_audio_sent(heard)
    await world.advance(1.0)
    await world.advance(2.0)
    world.monitor.speech_started(world.clock.now_s() - 0.1)
    assert user_stats.response_gap_s == pytest.approx(1.9)


async def test_the_pace_is_measured_on_complete_responses_only(world):
    playback = world.respond()
    before = world.monitor.user_stats.frames_per_token
    world.monitor.turn_result(playback, n_tokens=10, n_frames=20, spoken=False)
    world.monitor.turn_result(playback, n_tokens=0, n_frames=20, spoken=True)
    world.monitor.turn_result(playback, n_tokens=10, n_frames=0, spoken=True)
    assert world.monitor.user_stats.frames_per_token == before
    world.monitor.turn_result(playback, n_tokens=10, n_frames=20, spoken=True)
    assert world.monitor.user_stats.frames_per_token == pytest.approx(0.7 * before + 0.3 * 2)


async def test_seconds_are_counted_when_nothing_can_change_them_any_more(world):
    playback = world.respond("r1")
    world.monitor.audio_sent(playback, 2.0)
    await world.advance(0.5)
    world.monitor.stopped(playback, barge_in=True)
    world.monitor.acked(playback, 0.4)
    assert world.value("audio_sent_seconds_total") == 2.0
    assert world.value("audio_heard_seconds_total") == 0
    world.monitor.response_created("r2")
    assert world.value("audio_heard_seconds_total") == pytest.approx(0.4)
    assert world.value("audio_unheard_seconds_total") == pytest.approx(1.6)
    assert world.value("playback_acks_total", outcome="accepted") == 1


async def test_a_gap_in_playback_is_counted(world):
    playback = world.respond()
    for _ in range(2):
        world.monitor.audio_generated(playback, 0.2)
        world.monitor.audio_sent(playback, 0.2)
        await world.advance(0.7)
    assert world.value("underruns_total") == 1
    assert world.value("underrun_seconds_total") == pytest.approx(0.5)
    assert world.stages.underruns == [0.5]
    assert world.events("underrun")[0]["silent_s"] == 0.5


async def test_only_the_part_of_a_gap_that_the_stages_caused_is_reported_to_them(world):
    """Audio that was generated and not sent is a delay of the network."""
    playback = world.respond()
    world.monitor.audio_generated(playback, 0.2)
    world.monitor.audio_sent(playback, 0.2)
    await world.advance(0.3)
    world.monitor.audio_generated(playback, 0.2)  # 0.1 s late
    await world.advance(0.4)
    world.monitor.audio_sent(playback, 0.2)
    assert world.value("underrun_seconds_total") == pytest.approx(0.5)
    assert world.stages.underruns == [0.1]


async def test_a_truncation_ends_playback_of_a_finished_response_but_not_of_a_running_one(world):
    playback = world.respond("r1")
    world.monitor.audio_sent(playback, 2.0)
    await world.advance(1.0)
    world.monitor.truncated(playback, 0.6)
    assert world.monitor.audible(playback)
    world.monitor.all_audio_sent(playback)
    world.monitor.truncated(playback, 0.6)
    assert not world.monitor.audible(playback)
    assert playback.clock.heard_s(200.0) == 0.6


async def test_the_timeline_has_its_events_in_seconds_of_the_session(world):
    playback = world.respond()
    for _ in range(3):
        world.monitor.audio_sent(playback, 0.25)
        await world.advance(0.125)  # too soon for another entry
        world.monitor.audio_sent(playback, 0.25)
        await world.advance(0.125)
    world.monitor.all_audio_sent(playback)
    world.monitor.response_done(playback, "completed")
    await world.advance(1.0)
    document = world.timeline.to_json()
    assert (document["session"], document["began_unix_s"], document["dropped"]) == ("s", 1.0, 0)
    names = ["response_created", "first_audio", "sent", "playing", *["sent"] * 3]
    assert [e["event"] for e in document["events"]] == [*names, "response_done", "dry"]
    sent = world.events("sent")
    assert [e["t_s"] for e in sent] == [0.0, 0.25, 0.5, 0.75]
    assert sent[-1] == {
        "t_s": 0.75,
        "event": "sent",
        "response": "r1",
        "sent_s": 1.5,
        "heard_s": 0.75,
        "generated_s": 0.0,
    }


def test_a_timeline_keeps_its_beginning_and_counts_the_rest(monkeypatch, tmp_path):
    monkeypatch.setattr(timeline_module, "MAX_EVENTS", 2)
    timeline = Timeline("sess_1", began_s=0.0, began_unix_s=5.0)
    for n in range(5):
        timeline.add("ack", n)
    document = timeline.to_json()
    assert [event["t_s"] for event in document["events"]] == [0, 1]
    assert document["dropped"] == 3
    path = timeline.write(tmp_path / "new")
    assert path.name == "sess_1.json"
    assert '"dropped": 3' in path.read_text()


def test_a_timeline_that_is_not_written_keeps_nothing():
    timeline = Timeline("s", began_s=0.0, began_unix_s=0.0, keeps=False)
    timeline.add("ack", 1.0)
    assert timeline.to_json()["events"] == []


async def test_responses_that_are_never_played_do_not_accumulate(world):
    for n in range(100):
        playback = world.respond(f"r{n}")
        world.monitor.audio_sent(playback, 60.0)
        world.monitor.all_audio_sent(playback)
    assert len(world.monitor.playbacks) <= 17


async def test_a_barge_in_is_no_response_gap(world):
    first = world.respond("r1")
    world.monitor.audio_sent(first, 1.0)
    world.monitor.all_audio_sent(first)
    second = world.respond("r2")
    world.monitor.audio_sent(second, 1.0)
    await world.advance(1.5)
    world.monitor.speech_started(world.clock.now_s())
    assert world.monitor.user_stats.response_gap_s is None


async def test_the_end_of_playback_is_reported_when_audio_begins_moves_it_and_is_all_sent(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 0.5)
    assert world.stages.next_uses == [(0.5, None, None)]
    await world.advance(0.25)
    world.monitor.audio_sent(playback, 0.25)
    world.monitor.audio_sent(playback, 0.25)
    assert len(world.stages.next_uses) == 1, "not by more than the tolerance"
    world.monitor.audio_sent(playback, 0.25)
    assert world.stages.next_uses[1:] == [(1.0, None, None)]
    world.monitor.audio_sent(playback, 0.25)
    world.monitor.all_audio_sent(playback)
    assert world.stages.next_uses[2:] == [(1.25, None, None)]
    world.monitor.all_audio_sent(playback)
    await world.advance(2.0)
    assert len(world.stages.next_uses) == 3, "silence came when it was expected"


async def test_the_end_of_playback_counts_all_queued_responses(world):
    first = world.respond("r1")
    world.monitor.audio_sent(first, 2.0)
    world.monitor.all_audio_sent(first)
    await world.advance(0.5)
    world.monitor.audio_sent(world.respond("r2"), 1.0)
    assert world.stages.next_uses == [(2.0, None, None), (2.5, None, None)]


async def test_complete_text_counts_by_the_audio_that_it_will_have(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 2.0)
    assert world.stages.next_uses == [(2.0, None, None)]
    # The talker is paused while it is 2 s ahead; the text of 30 s is complete.
    pace = world.monitor.user_stats.frames_per_token
    n_tokens = round(30.0 / (pace * FRAME_S))
    world.monitor.text_completed(playback, n_tokens)
    whole_s = round(n_tokens * pace * FRAME_S, 3)
    assert world.stages.next_uses[1:] == [(whole_s, None, None)]
    for _ in range(20):
        await world.advance(1.0)
        world.monitor.audio_sent(playback, 1.0)
    assert len(world.stages.next_uses) == 2, "playback came as expected"
    # It speaks faster than expected, and is done after 24 s.
    world.monitor.audio_sent(playback, 2.0)
    n_frames = round(24.0 / FRAME_S)
    world.monitor.turn_result(playback, n_tokens=n_tokens, n_frames=n_frames, spoken=True)
    assert world.stages.next_uses[2:] == [(4.0, None, None)]


async def test_audio_beyond_the_expected_end_counts_as_sent(world):
    playback = world.respond()
    world.monitor.text_completed(playback, 10)
    world.monitor.audio_sent(playback, 10.0)
    assert world.stages.next_uses[-1] == (10.0, None, None)


async def test_the_pace_of_a_session_is_learned_from_spoken_tokens(world):
    first = world.respond("r1")
    world.monitor.text_completed(first, 10)
    # The other tokens are a function call.
    world.monitor.turn_result(first, n_tokens=60, n_frames=100, spoken=True)
    before = UserPrior().frames_per_token
    assert world.monitor.user_stats.frames_per_token == pytest.approx(0.7 * before + 0.3 * 10)


async def test_acks_move_the_end_of_playback(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 5.0)
    await world.advance(1.0)
    world.monitor.acked(playback, 0.75)
    assert world.stages.next_uses == [(5.0, None, None)]
    await world.advance(1.0)
    world.monitor.acked(playback, 1.25)
    assert world.stages.next_uses[1:] == [(3.75, None, None)]


@pytest.mark.parametrize("barge_in", [True, False])
async def test_stopped_playback_is_reported_as_silence_at_once(world, barge_in):
    playback = world.respond()
    world.monitor.audio_sent(playback, 0.5)
    await world.advance(0.25)
    world.monitor.stopped(playback, barge_in=barge_in)
    assert world.stages.next_uses[1:] == [(0.0, None, None)]
    world.monitor.stopped(world.respond("never heard"), barge_in=barge_in)
    assert len(world.stages.next_uses) == 2


async def test_a_truncation_is_reported_as_silence_at_once(world):
    playback = world.respond()
    world.monitor.audio_sent(playback, 0.5)
    world.monitor.all_audio_sent(playback)
    await world.advance(0.25)
    world.monitor.truncated(playback, 0.125)
    assert world.stages.next_uses[1:] == [(0.0, None, None)]


async def test_a_response_gap_is_reported_with_the_users_average(world):
    for n, gap_s in enumerate((2.0, 1.0)):
        playback = world.respond(f"r{n}")
        world.monitor.audio_sent(playback, 1.0)
        world.monitor.all_audio_sent(playback)
        await world.advance(1.0)
        await world.advance(gap_s)
        world.monitor.speech_started(world.clock.now_s())
    expected = [
        (to_play_s, pytest.approx(mean_s), pytest.approx(gap_s))
        for to_play_s, mean_s, gap_s in ((0.0, 2.0, 2.0), (0.0, 1.7, 1.0))
    ]
    assert [report for report in world.stages.next_uses if report[2] is not None] == expected
    world.monitor.speech_started(world.clock.now_s())
    assert len(world.stages.next_uses) == 4, "playback and gap, twice"


async def test_stream_events_are_noted_of_the_running_turn(world):
    world.respond()
    world.stages.on_stream_event("talker", "paused", 1.25)
    [note] = [e for e in world.events() if e["event"] == "stream"]
    assert (note["stage"], note["what"], note["buffered_s"]) == ("talker", "paused", 1.25)
    assert note["response"]


# --- speech at another speed: reports are of speech as it was made ---


async def test_reports_of_fast_speech_grow_by_its_speed(world):
    playback = world.respond(speed=1.5)
    world.monitor.audio_generated(playback, 3.0)
    assert playback.generated_s == 2.0
    world.monitor.audio_sent(playback, 2.0)
    await world.advance(1.0)
    assert world.stages.reports == [(0.0, False, 1.5), (0.0, True, 1.5)]  # none was needed
    await world.advance(1.5)
    assert world.stages.reports[-1] == (3.0, False, 1.5)


async def test_what_is_still_to_be_heard_of_it_is_in_played_seconds(world):
    playback = world.respond(speed=1.5)
    world.monitor.audio_sent(playback, 1.0)
    world.monitor.turn_result(playback, n_tokens=10, n_frames=75, spoken=True)
    assert world.stages.next_uses[-1][0] == 4.0
