import pytest

from benchmark.load.config import LoadConfig, parse_args


def test_arms_are_interleaved_and_take_turns_at_going_first():
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
    assert config.open_loop_rps == 0.5
    assert config.server_args == ("--talker.max-running-requests=8",)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--barge-in", "0.5"], "only 0 works"),
        (["--sessions", "0"], "from 1"),
        (["--turns", "0"], "at least 1"),
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
