"""The plan: its layouts fit and can be launched, its numbers follow from what was asked."""

import json
from dataclasses import replace

import pytest

from sglang_live.arguments import parse
from sglang_live.devices import devices_of_ranks
from sglang_live.errors import BadInputError
from sglang_live.extensions.planner import __main__ as command
from sglang_live.extensions.planner import report, search
from sglang_live.extensions.planner.config import parse_args
from sglang_live.extensions.planner.layouts import layouts
from sglang_live.extensions.planner.memory import memory_of
from sglang_live.extensions.planner.pattern import TalkPattern
from sglang_live.extensions.planner.search import Plan, PlanError, Served
from sglang_live.extensions.planner.simulation.engine.pool import PoolFullError
from sglang_live.extensions.planner.simulation.frontier import Capacity
from sglang_live.extensions.planner.simulation.load.stats import RunTotals, point_stats
from sglang_live.extensions.planner.simulation.run import World

POINT = point_stats("all", 8, [], [RunTotals(wall_s=1.0, cpu_s=0, peak_rss_mib=0, late_frames=0)])


def planned(*argv: str, users: int = 40) -> Plan:
    """As if the first layout that fits served these users."""
    config = parse_args(list(argv))
    served = tuple(
        Served(
            layout=layout,
            memory=memory_of(layout.placement, config.gpu.free_gib, config.sizes, config.model),
            found=Capacity(users, users + 2, "late"),
            point=POINT,
            bound="late",
        )
        for layout in layouts(config.n_gpus)
    )
    return Plan(config=config, best=served[0], served=served)


def ranks_of(device: str, args: dict) -> list[int]:
    return [int(name.removeprefix("cuda:")) for name in devices_of_ranks(device, args)]


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("number", range(5))
def test_the_flags_of_every_layout_are_accepted_by_the_server(gpu, number):
    found = planned("--gpu", gpu, "--gpus", "24")
    found = replace(found, best=found.served[number])
    layout, memory = found.best.layout, found.best.memory
    commands = report.commands(found)
    assert len(commands) == 24 // layout.n_gpus
    used: list[str] = []
    for argv in commands:
        config = parse(argv)
        stages = config.stages
        placement = layout.placement
        for stage, places in (
            ("thinker", placement.thinkers),
            ("talker", placement.talkers),
            ("vocoder", placement.vocoders),
        ):
            assert stages[stage].replicas == len(places)
        used += {
            f"cuda:{rank}"
            for stage in stages.values()
            for device in stage.devices
            for rank in ranks_of(device, stage.args)
        }
        assert stages["thinker"].args["max_total_tokens"] == memory.thinker_tokens
        assert stages["talker"].args["max_total_tokens"] == memory.talker_tokens
        assert ("quantization" in stages["thinker"].args) == memory.fp8
        assert config.capacity.max_sessions == 50
    assert sorted(used) == sorted(f"cuda:{n}" for n in range(24))
    assert len({parse(argv).listen.port for argv in commands}) == len(commands)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_what_is_on_a_gpu_fits_with_room_for_what_is_an_estimate(gpu):
    for one in planned("--gpu", gpu, "--gpus", "24").served:
        for memory in one.memory.gpus:
            assert 4 < memory.spare_gib < memory.free_gib
            assert all(part.gib > 0 for part in memory.parts)
    shared = {g: planned("--gpu", g).best.memory for g in ("h100", "h200")}
    assert shared["h100"].fp8 and not shared["h200"].fp8


def test_a_gpu_that_is_too_small_is_an_error_that_says_so():
    config = parse_args(["--device-model", str(parse_args([]).gpu.device_model), "--gpu-gib", "40"])
    with pytest.raises(BadInputError, match=r"does not fit: of 40 GiB"):
        search.plan(config)


def test_a_pattern_determines_turns_and_tokens_of_a_session():
    short, long = TalkPattern(session_min=1), TalkPattern(session_min=60)
    assert short.longest.n_tokens < long.longest.n_tokens == 2048 + 256
    assert long.session_tokens == 2504
    assert TalkPattern(interruptions=1).turn_s < TalkPattern(interruptions=0).turn_s
    workload = TalkPattern(talk_s=10, response_s=20, interruptions=0.3).workload
    spoken_s = [clip.end_s - clip.onset_s for clip in workload.clips.values()]
    assert sum(spoken_s) / len(spoken_s) == pytest.approx(10)
    assert workload.response_durations_s.mean() == pytest.approx(20)
    assert workload.barge_in == 0.3


def test_arrivals_and_a_price_become_gpus_and_a_cost():
    found = planned("--gpus", "4", "--price", "3", "--sessions-per-hour", "1200", users=40)
    # 100 sessions at once on average, 131 once in a thousand: four servers of 40.
    assert found.users_at_peak == 131
    assert found.gpus_needed == 4
    assert found.price_per_talk_hour == pytest.approx(3 * 4 / 160)
    text = report.text(found)
    assert "0.0750 for an hour of one session" in text and "4 GPUs" in text
    found = planned()
    assert (found.users_at_peak, found.gpus_needed, found.price_per_talk_hour) == (None,) * 3
    assert "cost" not in report.text(found)


def test_a_plan_as_json_has_what_the_text_says():
    found = planned("--gpu", "h200", "--gpus", "2", "--price", "3")
    document = json.loads(json.dumps(report.document(found)))
    assert document["users"] == 80 and document["users_per_gpu"] == 40
    assert document["commands"] == report.commands(found)
    assert set(document["simulated"]) >= {"modelled_device", "file_sha256", "estimates"}
    [memory] = document["memory"]
    assert sum(memory["parts"].values()) + memory["spare_gib"] == pytest.approx(139, abs=0.1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu", "a100"], "no device model of it; there are h100, h200"),
        (["--model-path", "/models/Llama-3.1-8B"], "only Qwen3-Omni-30B-A3B"),
        (["--device-model", "x.toml"], "--gpu-gib"),
        (["--device-model", "x.toml", "--gpu-gib", "80"], "x.toml"),
        (["--gpus", "0"], "--gpus"),
        (["--talk-s", "-1"], "--talk-s"),
        (["--response-s", "nan"], "--response-s"),
        (["--interruptions", "1.5"], "--interruptions"),
        (["--session-min", "0"], "--session-min"),
        (["--frames-per-token", "0.5"], "--frames-per-token"),
        (["--first-audio-ms", "0"], "--first-audio-ms"),
        (["--continuous", "1.2"], "--continuous"),
        (["--price", "-2"], "--price"),
        (["--sessions-per-hour", "inf"], "--sessions-per-hour"),
        (["--hours", "25"], "--hours"),
    ],
)
def test_bad_input_is_refused_with_its_reason(argv, said, capsys):
    with pytest.raises(SystemExit):
        parse_args(argv)
    assert said in capsys.readouterr().err


@pytest.fixture
def quick(monkeypatch):
    """Simulates few users, once."""
    monkeypatch.setattr(search, "_SAMPLE", 4)
    monkeypatch.setattr(search, "_FIRST", 4)


def test_a_small_plan_is_simulated_from_flags_to_text(quick, capsys):
    assert command.main(["--sessions-per-server", "4", "--session-min", "1"]) == 0
    text = capsys.readouterr().out
    assert "4 users at once, 4 per GPU" in text
    assert "sessions of one server process" in text
    assert "python -m sglang_live.launch_server --model-path" in text


def test_a_target_that_cannot_be_met_says_what_is(quick, capsys):
    argv = ["--first-audio-ms", "50", "--sessions-per-server", "4", "--session-min", "1"]
    assert command.main(argv) == 1
    said = capsys.readouterr().err
    assert "the target is not met" in said
    assert "all stages on one GPU: 1 at once, P90 " in said


def test_users_that_do_not_fit_into_a_pool_bound_the_plan(quick, monkeypatch):
    config = parse_args(["--sessions-per-server", "64", "--session-min", "30"])
    layout = layouts(1)[0]
    memory = memory_of(layout.placement, 78, config.sizes, config.model)
    small = replace(memory, thinker_tokens=20_000)

    def simulate(self: World, arm: str, n_users: int, repeat: int = 0):
        raise PoolFullError("the thinker's pool of 20000 tokens is full")

    monkeypatch.setattr(World, "simulate", simulate)
    monkeypatch.setattr(search, "memory_of", lambda *_: small)
    with pytest.raises(PlanError, match=r"all stages on one GPU: the thinker's pool of 20000"):
        search.plan(config)
