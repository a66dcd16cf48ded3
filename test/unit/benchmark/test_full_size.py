"""The checks at full size: what they find in batches, and what they do with their time."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmark.gpu import __main__ as command
from benchmark.gpu import full_constants, full_load, full_size, page_copy
from benchmark.gpu.findings import Findings
from benchmark.load.point import RunResult, Workload
from lab.recorders.batch_clock import Batch
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.extensions.planner.simulation.load.rows import TurnRow
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord
from sglang_live.stages.engine_args import read_engine_argument


def _batch(ms: float, **facts) -> Batch:
    usual = {"is_decode": True, "n_streams": 1, "kv_tokens": 0, "n_tokens": 0, "audio_s": 0.0}
    times = {"chosen_s": 0.0, "began_s": 1.0, "done_s": 1.0 + ms / 1e3}
    return Batch(**(usual | facts | times))


def test_decode_costs_are_found_in_rounds_of_all_streams():
    rows = []
    for n in (1, 8, 32):
        for context in (50, 2000):
            rounds = [
                _batch(7.0 + 0.1 * n + 4e-5 * n * context, n_streams=n, kv_tokens=n * context)
            ]
            fewer = [_batch(99.0, n_streams=n + 1)]
            rows.append(full_constants._decode_row(n, rounds * 3 + fewer))
    figures = full_constants._decode_figures(rows)
    found = {name: value for name, (value, _) in figures.items()}
    assert found["decode_fixed_ms"] == pytest.approx(7.0)
    assert found["decode_per_stream_ms"] == pytest.approx(0.1)
    assert found["decode_per_kv_token_ns"] == pytest.approx(40)


def test_a_round_reads_at_least_its_weights_and_kv():
    sizes = {
        "vocab_size": 152_064,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    # Without its embeddings, the model has 3.05 billion parameters active, and 30.2 in all.
    assert full_constants.read_bytes(sizes, 1, 0) / 2e9 == pytest.approx(3.05, rel=0.01)
    assert full_constants.read_bytes(sizes, 10_000, 0) / 2e9 == pytest.approx(30.2, rel=0.01)
    one_more = full_constants.read_bytes(sizes, 1, 1) - full_constants.read_bytes(sizes, 1, 0)
    assert one_more == 98_304


def test_rounds_that_never_had_all_streams_are_an_error():
    with pytest.raises(RuntimeError, match=r"no round had 3 streams, but \[2\]"):
        full_constants._decode_row(3, [_batch(1.0, n_streams=2)])


def test_audio_costs_what_it_adds_to_a_prefill():
    prefill = full_constants._prefill_figures(
        [{"tokens": n, "ms": 15 + 0.02 * n} for n in (50, 2000)]
    )
    clips = [{"tokens": 13 * s, "audio_s": s, "ms": 15 + 0.26 * s + 1.5 * s} for s in (1, 4, 12)]
    value, source = full_constants._encoder_figure(clips, prefill)["encoder_per_audio_s_ms"]
    assert value == pytest.approx(1.5, rel=1e-3)
    assert source.startswith("measured: ")


def test_the_code_predictor_is_taken_out_of_the_talkers_rounds():
    rounds = {
        "decode_fixed_ms": (12.0, "measured: x"),
        "decode_per_stream_ms": (0.03, "measured: x"),
        "decode_per_kv_token_ns": (8.0, "measured: x"),
    }
    predictor = {
        "code_predictor_fixed_ms": (8.0, "measured: y"),
        "code_predictor_per_stream_ms": (0.05, "measured: y"),
    }
    found = full_constants._without_predictor(rounds, predictor)
    assert found["decode_fixed_ms"][0] == pytest.approx(4.0)
    assert found["decode_per_kv_token_ns"] == rounds["decode_per_kv_token_ns"]
    value, source = found["decode_per_stream_ms"]
    assert value > 0 and source.startswith("estimate: ")


def test_a_device_model_can_be_read_after_each_part(tmp_path):
    growing = full_constants.Growing("a test's GPU", "cpu")
    growing.measured["thinker"] = {"decode_fixed_ms": (6.5, "measured: here")}
    found = growing.after("one part")
    path = tmp_path / "model.toml"
    path.write_text(found.files["device_model.toml"])
    model = load_device_model(path)
    assert model.thinker.decode_fixed_ms == 6.5
    assert "thinker.decode_fixed_ms" not in model.estimates
    assert model.talker.decode_fixed_ms == 3.2  # the H200's
    assert list(found.figures["parts_ended_s"]) == ["one part"]


def test_a_clip_of_noise_is_a_sound_file():
    import io

    import numpy as np
    import soundfile

    samples, rate_hz = soundfile.read(
        io.BytesIO(full_constants._noise_wav(np.random.default_rng(1), 2))
    )
    assert (len(samples), rate_hz) == (32_000, 16_000)


def test_the_bandwidth_of_a_device_is_measured():
    assert full_constants._device_gb_per_s(torch.device("cpu")) > 0


def test_engines_have_their_memory_by_flags_that_sglang_has():
    sizes = full_size.GRAPH_SIZES
    assert full_size.server_args("cpu", sizes) == ()
    for typed in full_size.server_args("cuda", sizes):
        stage, _, rest = typed.removeprefix("--").partition(".")
        name, _, text = rest.partition("=")
        field, value = read_engine_argument(typed, name.replace("-", "_"), text)
        assert full_size.engine_args(stage, "cuda", sizes)[field] == value


def test_a_check_takes_no_longer_than_its_script_allows(monkeypatch):
    monkeypatch.delenv(full_size.LIMIT_ENV, raising=False)
    assert full_size.remaining_s(100.0, 10.0, 40.0) == 70.0
    monkeypatch.setenv(full_size.LIMIT_ENV, "50")
    assert full_size.remaining_s(100.0, 10.0, 40.0) == 20.0


def _result(n: int, **record) -> RunResult:
    turn = {"kind": "speech", "status": "completed", "ttfp_ms": 900.0, "end_of_turn_ms": 600.0}
    row = TurnRow(
        user=0,
        turn=0,
        clip="a",
        response_gap_s=0.0,
        start_s=0.0,
        end_s=5.0,
        record=TurnRecord(**(turn | record)),
    )
    run = SimpleNamespace(repeat=0, sessions=n, policies="all", rate_rps=None)
    return RunResult(run=run, rows=[row], wall_s=5.0, server_start_s=1.0, late_frames=0.0)


@pytest.fixture
def served(monkeypatch):
    """Loads on a server that is not there. Each takes 40 s."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(full_load.time, "monotonic", lambda: clock.now_s)
    monkeypatch.setattr(Workload, "load", classmethod(lambda cls, config: None))

    @dataclass
    class FakeServer:
        start_s: float = 1.0

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    def measure_on(server, config, run, workload):
        clock.now_s += 40.0
        assert config.drawn_replies
        return _result(run.sessions)

    monkeypatch.setattr(full_load, "server_for", lambda config, run: FakeServer())
    monkeypatch.setattr(full_load, "measure_on", measure_on)


TWO = full_load.Options(scale="tiny", sessions=(1, 2, 3))


def test_findings_grow_load_by_load(served):
    grown = list(full_load.run(TWO, "cpu", seed=1))
    assert [len(found.figures["loads"]) for found in grown] == [1, 2, 3, 3]
    load = grown[-1].figures["loads"][2]
    assert load["after_end_ms"]["mean"] == 300.0
    assert load["first_audio_ms"]["p90"] == 900.0
    assert grown[-1].problems == ()
    assert "the goal is missed" in grown[-1].lines[0]


def test_a_load_that_would_not_end_in_time_is_left_out(served, monkeypatch):
    monkeypatch.setenv(full_size.LIMIT_ENV, "160")
    *_, last = full_load.run(TWO, "cpu", seed=1)
    assert list(last.figures["loads"]) == [1, 2]
    assert last.figures["left_out"] == [3]
    assert "no time for [3] users" in last.lines


def test_failed_turns_are_a_problem():
    load = full_load.judge(_result(4, status="failed", error="late"))
    found = full_load.findings({}, {4: load}, TWO)
    assert found.problems == (
        "1 of 1 turns of 4 users failed: ['failed: late']",
        "4 users heard nothing",
    )


def test_the_document_of_a_check_grows_and_keeps_what_was_found_before_an_error(
    tmp_path, monkeypatch
):
    seen = []

    def run(options, device, seed):
        yield Findings({"first": 1}, (), ())
        [path] = tmp_path.glob("*.json")
        seen.append(json.loads(path.read_text()))
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(page_copy, "run", run)
    args = ["page_copy", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    assert command.main(args) == command.FAILED
    [path] = tmp_path.glob("*.json")
    last = json.loads(path.read_text())
    assert seen[0]["figures"] == last["figures"] == {"first": 1}
    assert (seen[0]["passed"], seen[0]["problems"]) == (False, ["the check did not end"])
    assert last["problems"] == ["RuntimeError: the device is gone"]


def test_the_limits_of_the_script_fit_one_session():
    script = (Path(__file__).parents[3] / "scripts/gpu_check.sh").read_text()
    limits = {name: int(s) for name, s in re.findall(r"\[(full_\w+)\]=(\d+)", script)}
    assert set(limits) == set(re.search(r"^FULL_SIZE=\((.*)\)", script, re.M)[1].split())
    # What is left of 590 s is for full_policies.
    assert limits["full_constants"] + limits["full_load"] <= 430
