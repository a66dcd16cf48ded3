"""benchmark.simulate: its flags, its users, and the comparison with an engine."""

from dataclasses import replace

import numpy as np
import pytest

from benchmark.load.config import LoadConfig, Run
from benchmark.load.point import RunResult
from benchmark.load.point import Workload as SpokenWorkload
from benchmark.load.report import document
from benchmark.simulate.__main__ import Loads
from benchmark.simulate.against import compare
from benchmark.simulate.config import H100, parse_args
from benchmark.simulate.gains import Measured, bounds
from benchmark.simulate.server_args import server_of
from sglang_live.client.clip import FRAME_S
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.extensions.planner.simulation.frontier import Capacity
from sglang_live.extensions.planner.simulation.noise import Noise
from sglang_live.extensions.planner.simulation.placement import APART
from sglang_live.extensions.planner.simulation.run import ADMITTED, World, point_of
from sglang_live.extensions.planner.simulation.spec import HostTimes, ServerSpec
from sglang_live.extensions.planner.simulation.users import UserSettings
from sglang_live.extensions.planner.simulation.workload import History, Workload
from sglang_live.stages.spec import STAGES
from sglang_live.stages.vocoder.config import VocoderConfig

MODEL = load_device_model(H100)


def test_simulated_users_are_those_of_voice_load():
    config = LoadConfig(turns=3, barge_in=0.5, drawn_replies=True)
    spoken = SpokenWorkload.load(config)
    simulated = Workload.load(turns=3, barge_in=0.5, seed=1)
    assert simulated.plans(4, 1) == spoken.plans(config, Run(1, 4, "off"))
    for name, utterance in spoken.speech.items():
        clip = simulated.clips[name]
        assert clip.duration_s == pytest.approx(utterance.duration_s)
        assert clip.onset_s == pytest.approx(utterance.onset * FRAME_S)
        assert clip.end_s == pytest.approx(utterance.end * FRAME_S)


def test_flags_name_loads_and_arms(tmp_path):
    read = parse_args(["--policies", "off,all", "--sessions", "2,4", "--barge-in", "0,0.5"])
    assert read.policies == ("off", "all") and read.barge_in == (0.0, 0.5)
    with pytest.raises(SystemExit):
        parse_args(["--policies", "off,nonsense"])
    with pytest.raises(SystemExit):
        parse_args(["--devices", "2"])


def starts_s(*flags: str) -> np.ndarray:
    config = parse_args(["--turns", "1", "--arrive-s", "100", *flags])
    return np.array([user.start_s for user in config.workload(0.0).plans(400, 0)])


def test_an_open_loop_arrives_at_its_rate_in_bursts_of_the_shape():
    poisson, bursts = np.diff(starts_s()), np.diff(starts_s("--arrival-shape", "0.25"))
    assert poisson.mean() == pytest.approx(0.25, rel=0.15)
    assert bursts.mean() == pytest.approx(0.25, rel=0.25)
    assert bursts.std() / bursts.mean() > 1.5 * poisson.std() / poisson.mean()
    assert (starts_s("--trace-arrivals") != starts_s()).any()


@pytest.mark.parametrize(
    "flags",
    [
        ["--arrival-shape", "0.25"],
        ["--arrive-s", "60", "--arrival-shape", "0"],
        ["--arrive-s", "60", "--arrival-shape", "0.25", "--trace-arrivals"],
        ["--history-tokens", "-1"],
        ["--kv-weight", "-1"],
    ],
)
def test_flags_without_a_meaning_are_refused(flags):
    with pytest.raises(SystemExit):
        parse_args(flags)


def test_flags_reach_the_thinker_and_the_users():
    config = parse_args(["--kv-weight", "0", "--reserve-all", "--history-tokens", "100"])
    assert config.server.thinker_policy.urgency.beta == 0 and config.server.thinker_reserves_all
    assert config.users.longest == History(100, 0, has_kv=False)
    assert parse_args(["--policies", f"off,{ADMITTED}"]).policies == ("off", ADMITTED)


@pytest.fixture(scope="module")
def engine_document() -> dict:
    """As voice_load would write of an engine that is exactly as simulated."""
    load = LoadConfig(
        policies=("off",),
        sessions=(5,),
        turns=2,
        repeats=1,
        device_model=H100,
        drawn_replies=True,
        server_args=("--speculate-ms=off", "--vocoder.max-batch=8", "--chunked-prefill-size=256"),
    )
    spec = ServerSpec(
        model=MODEL,
        header_tokens=1,
        chunk_tokens=256,
        thinker_tokens=65_536,
        talker_tokens=65_536,
        vocoder=VocoderConfig(max_batch=8),
    )
    workload = Workload.load(turns=2, barge_in=0.0, seed=1)
    run = World(workload, spec, UserSettings()).simulate("off", 5)
    nothing = {"computed_s": 0.0, "batches": 10.0, "late_s": 0.5, "modelled_s": 2.0}
    result = RunResult(
        run=Run(0, 5, "off"),
        rows=run.rows,
        wall_s=run.wall_s,
        server_start_s=0.0,
        late_frames=0.0,
        talker_frames=run.talker_frames,
        device={stage: nothing for stage in ("thinker", "talker")},
    )
    return document(load, [result], {"device_model": MODEL.facts()})


def test_an_engine_that_is_as_simulated_agrees_in_every_measure(engine_document):
    found = compare(engine_document)
    assert {one.measure for one in found} > {"ttfp_after_end_p50_ms", "waste_share", "turns_per_s"}
    assert [one.simulated for one in found] == pytest.approx([one.engine for one in found])
    assert all(one.agrees for one in found)
    assert {one.late for one in found} == {0.25}


def test_an_engine_that_is_later_disagrees(engine_document):
    [point] = engine_document["points"]
    later = {**point["ttfp_ms"], "p50": 1.2 * point["ttfp_ms"]["p50"]}
    changed = {**engine_document, "points": [{**point, "ttfp_ms": later}]}
    assert {one.measure for one in compare(changed) if not one.agrees} == {"ttfp_p50_ms"}


def test_a_load_that_is_not_simulated_is_refused(engine_document):
    config = {**engine_document["config"], "drawn_replies": False}
    with pytest.raises(ValueError, match="--drawn-replies"):
        compare({**engine_document, "config": config})


def test_a_slower_clock_takes_less_of_the_host(engine_document):
    def first_ms(document):
        found = compare(document)
        return next(one.simulated for one in found if one.measure == "ttfp_after_end_p50_ms")

    slower = first_ms({**engine_document, "clock_divisor": 4})
    host = HostTimes()
    least_ms = 1000 * 0.75 * (host.to_thinker_s + host.to_talker_s + host.to_client_s)
    # What comes sooner may wait for the end of the round that runs then.
    round_ms = 1000 * MODEL.talker.decode_s(1, 0)
    assert slower < first_ms(engine_document) - (least_ms - round_ms)


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        ((), "chunk_tokens", 512),
        ((), "speculate_ms", 200),
        (("--speculate-ms=off",), "speculate_ms", None),
        (("--speculate-ms=300",), "speculate_ms", 300),
        (("--chunked-prefill-size=2048",), "chunk_tokens", 2048),
        (("--thinker.max-total-tokens=9000",), "thinker_tokens", 9000),
        (("--disable-overlap-schedule",), "overlap", False),
        (("--vocoder.max-batch=16",), "vocoder", VocoderConfig(max_batch=16)),
        (tuple(f"--{stage}.device=cuda:{n}" for n, stage in enumerate(STAGES)), "placement", APART),
    ],
)
def test_flags_of_the_server_are_simulated(args, field, value):
    spec = server_of(MODEL, HostTimes(), args)
    assert getattr(spec, field) == value


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--speculate-ms=soon",), "--speculate-ms=soon"),
        (("--schedule-policy=lpm",), "--schedule-policy"),
        (("--talker.chunked-prefill-size=64",), "--talker.chunked"),
        (("--talker.device=cuda:1",), "device"),
        (("--vocoder.max-batch=many",), "--vocoder.max-batch=many"),
    ],
)
def test_flags_that_are_not_simulated_are_refused(args, named):
    with pytest.raises(ValueError, match=named):
        server_of(MODEL, HostTimes(), args)


def test_the_distance_to_what_the_device_allows():
    workload = Workload.load(turns=20, barge_in=0.0, seed=1)
    world = World(workload, ServerSpec(model=load_device_model(H100)), UserSettings())

    def measured(users: int) -> Measured:
        run = world.simulate("off", users)
        point = point_of("off", users, [run])
        return Measured(point, (point,), run.busy)

    found = bounds(measured, 10)
    assert found is not None and found.at == 8
    alone, there = (measured(n).whole.ttfp_after_detection_ms.p90 for n in (1, 8))
    assert found.alone_ms == alone
    assert found.times_alone == there / alone > 1.0
    assert measured(2).busy < found.busy < 1.0


def test_numbers_of_users_may_be_shares_of_what_the_best_baseline_serves():
    flags = ("--policies", "stock,all", "--frontier", "--of-knee", "0.5,1.3", "--pauses-s", "2")
    config = parse_args(flags)
    assert config.baselines == ("stock",) and config.noise == Noise(2.0)
    loads = Loads(config, 0.0)
    loads.capacities = {"stock": Capacity(40, 41, ""), "all": Capacity(60, 61, "")}
    assert loads.sessions == (20, 52)


@pytest.mark.parametrize(
    "flags",
    [
        ("--of-knee", "1"),
        ("--frontier", "--of-knee", "0,1"),
        ("--policies", "all", "--frontier", "--of-knee", "1"),
        ("--pauses-s", "-1"),
        ("--devices", "3", "--sharing", "mps"),
    ],
)
def test_flags_that_cannot_be_together_are_refused(flags):
    with pytest.raises(SystemExit):
        parse_args(flags)


@pytest.mark.parametrize("sharing", ["time-slices", "mps"])
def test_a_device_that_processes_share_serves_all_turns(sharing):
    spec = replace(ServerSpec(model=MODEL), sharing=sharing)
    world = World(Workload.load(turns=1, barge_in=0.5, seed=1), spec, UserSettings())
    for arm in ("stock+no-overlap", "all"):
        found = world.simulate(arm, 6)
        assert all(row.record.ok for row in found.rows) and found.sessions_left == 0
