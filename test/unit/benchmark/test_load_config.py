import numpy as np
import pytest

from benchmark.load.config import LoadConfig, Run, parse_args
from benchmark.load.point import response_lengths
from benchmark.load.server import command
from sglang_live.extensions.planner.simulation.load.storm import StormSpec


def test_arms_are_interleaved_and_alternate_in_going_first():
    config = LoadConfig(policies=("off", "all"), sessions=(1, 8), repeats=2)
    order = [(run.repeat, run.sessions, run.policies) for run in config.runs()]
    assert order == [
        (0, 1, "off"),
        (0, 1, "all"),
        (0, 8, "off"),
        (0, 8, "all"),
        (1, 1, "all"),
        (1, 1, "off"),
        (1, 8, "all"),
        (1, 8, "off"),
    ]


def test_flags_become_the_config():
    command = "--policies off,urgency+pacing --sessions 2,4 --turns 3 --open-loop 0.5 --seed 9"
    config = parse_args([*command.split(), "--server-arg=--talker.max-running-requests=8"])
    assert config.policies == ("off", "urgency+pacing")
    assert config.sessions == (2, 4)
    assert config.open_loop_rps == (0.5,)
    assert config.server_args == ("--talker.max-running-requests=8",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--barge-in", "1.5"], "shares from 0 to 1"),
        (["--false-triggers", "-0.1"], "shares from 0 to 1"),
        (["--barge-in", "0.5", "--turns", "1"], "the next turn interrupts"),
        (["--policies", "off,pace"], "no policy is called pace"),
        (["--duration-s", "60"], "needs --open-loop"),
        (["--storm", "4:10"], "N:PERIOD_S:CLIP_S"),
        (["--frame-ms", "30"], "multiple of 20"),
        (["--sessions", "0"], "from 1"),
        (["--turns", "0"], "at least 1"),
        (["--max-tokens", "0"], "at least 1"),
        (["--history-words", "-1"], "not be negative"),
        (["--max-tokens", "9", "--drawn-replies"], "not beside --drawn-replies"),
        (["--policies", "off,off"], "twice"),
        (["--open-loop", "-1"], "positive"),
        (["--json", "missing/out.json"], "no such folder"),
    ],
)
def test_a_wrong_value_is_a_clear_error(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_barge_in_zero_is_accepted():
    assert parse_args(["--barge-in", "0"]).barge_in == 0.0


def test_an_ablation_is_a_list_of_arms():
    config = parse_args(["--policies", "off,urgency,urgency+pacing,deadline+truncate,all"])
    assert len(config.policies) == 5


def test_an_arm_may_be_without_overlap():
    [arm] = parse_args(["--policies", "truncate+preheat+no-overlap"]).policies
    given = command("demo", arm, 1, ("--max-sessions=8",))
    assert "truncate,preheat" in given and given[-1] == "--max-sessions=8"
    for engine in ("thinker", "talker"):
        assert f"--{engine}.disable-overlap-schedule" in given
    with pytest.raises(SystemExit):
        parse_args(["--policies", "no-overlap"])


@pytest.mark.parametrize("suffix", ["", "+no-overlap"])
def test_stock_is_sglang_alone_with_clients_that_keep_the_conversation(suffix):
    [arm] = parse_args(["--policies", f"stock{suffix}"]).policies
    given = command("demo", arm, 1, ())
    assert given[given.index("--live-policies") + 1] == "off"
    assert "lab.launch_server" in given and "--stateless" in given
    assert ("--thinker.disable-overlap-schedule" in given) == bool(suffix)


@pytest.mark.parametrize(
    ("has_gpu", "args", "turns"),
    [(True, (), True), (False, (), False), (False, ("--device-model=h100",), True)],
)
def test_all_policies_have_turns_only_on_a_gpu_or_a_modelled_one(monkeypatch, has_gpu, args, turns):
    monkeypatch.setattr("benchmark.load.server.may_have_gpu", lambda: has_gpu)
    given = command("demo", "all", 1, args)
    names = given[given.index("--live-policies") + 1].split(",")
    assert ("arbiter" in names) == turns and "admission" not in names


def test_an_open_loop_with_a_duration_has_rate_times_duration_users():
    args = "--open-loop 0.5,2 --duration-s 60 --turns 1 --repeats 1"
    config = parse_args(args.split())
    assert [(run.sessions, run.rate_rps) for run in config.runs()] == [(30, 0.5), (120, 2.0)]


def test_every_rate_is_a_point():
    config = LoadConfig(open_loop_rps=(1.0, 2.0), sessions=(8, 16), repeats=1)
    assert config.points == [(8, 1.0), (16, 1.0), (8, 2.0), (16, 2.0)]


def test_the_server_has_room_for_all_users():
    config = LoadConfig(storm=StormSpec(10, 10.0, 30.0))
    assert config.server_args_for(Run(0, 44, "off")) == ()
    assert config.server_args_for(Run(0, 60, "off")) == ("--max-sessions=80",)
    given = LoadConfig(server_args=("--max-sessions=10",))
    assert given.server_args_for(Run(0, 100, "off")) == ("--max-sessions=10",)


def test_flags_select_the_kinds_of_interruptions():
    args = "--barge-in 0.5 --false-triggers 0.1 --no-truncate --acks --frame-ms 40"
    config = parse_args(args.split())
    assert (config.barge_in, config.false_triggers) == (0.5, 0.1)
    assert (config.truncate, config.acks, config.frame_ms) == (False, True, 40)


def test_responses_are_bounded_by_max_tokens():
    lengths = response_lengths(parse_args(["--max-tokens", "40"]), np.array([1.0, 9.0]))
    assert lengths.draw_tokens(np.random.default_rng(1)) == 40
    assert response_lengths(parse_args([]), np.array([1.0])) is None
