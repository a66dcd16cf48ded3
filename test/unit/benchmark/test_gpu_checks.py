"""The GPU checks at toy sizes, comparing the CPU with itself: results must be equal."""

import importlib
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.pool_host import mha

from benchmark.gpu import __main__ as command
from benchmark.gpu import (
    arms,
    code2wav,
    code_predictor,
    constants,
    flow,
    page_copy,
    places,
    server,
    shared_memory,
    syncs,
    voice_load,
    write_back,
)
from benchmark.gpu.findings import CannotRunError, Findings
from benchmark.gpu.measuring import exact_float32
from lab.random_model.flow import FlowShape, random_flow, random_hift
from sglang_live.extensions.planner.device_model.model import load_device_model
from sglang_live.extensions.planner.simulation.turn_record import TurnRecord
from sglang_live.sgl_patches import kv_copy

PREDICTOR, VOCODER = code_predictor.TINY, code2wav.TINY
PAGES, TRANSFERS = page_copy.TINY, write_back.TINY


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_code_predictor_agrees_with_itself_in_every_precision():
    found = code_predictor.run(PREDICTOR, "cpu", seed=1)
    agreement = found.figures["agreement"]
    assert found.problems == ()
    assert agreement["float32_equal"] == agreement["bfloat16_equal_to_cpu_bfloat16"] == 1.0


def test_code_predictor_rows_have_no_graph_time_without_cuda():
    rows = code_predictor.run(PREDICTOR, "cpu", seed=1).figures["bfloat16_ms_per_frame"]
    assert [(row["batch"], row["mode"]) for row in rows] == [
        (1, "greedy"),
        (1, "sampled"),
        (3, "greedy"),
        (3, "sampled"),
    ]
    assert all(row["eager_ms"] > 0 and row["graph_ms"] is None for row in rows)


def test_a_code_predictor_that_differs_is_a_problem(monkeypatch):
    placed = code_predictor._placed
    broken = code_predictor.build(PREDICTOR, seed=2)
    calls = []

    def swap(model, device, dtype):
        calls.append(dtype)
        # The CPU's float32 copy is placed first, the device's later.
        return placed(broken if dtype == torch.float32 and len(calls) > 1 else model, device, dtype)

    monkeypatch.setattr(code_predictor, "_placed", swap)
    (problem,) = code_predictor.run(PREDICTOR, "cpu", seed=1).problems
    assert "float32 codes differ" in problem


def test_the_default_sizes_are_those_of_transformers():
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
        Qwen3OmniMoeCode2WavConfig,
        Qwen3OmniMoeTalkerCodePredictorConfig,
    )

    ours, theirs = code_predictor.Options(), Qwen3OmniMoeTalkerCodePredictorConfig()
    assert (ours.hidden, ours.layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.head_dim, ours.intermediate) == (theirs.head_dim, theirs.intermediate_size)
    assert ours.vocab == theirs.vocab_size
    ours, theirs = code2wav.Options(), Qwen3OmniMoeCode2WavConfig()
    assert (ours.hidden, ours.layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert (ours.intermediate, ours.heads) == (theirs.intermediate_size, theirs.num_key_value_heads)
    assert (ours.decoder_dim, ours.codebook) == (theirs.decoder_dim, theirs.codebook_size)
    assert ours.window == theirs.sliding_window


def test_the_vocoder_agrees_with_itself_to_the_last_bit():
    found = code2wav.run(VOCODER, "cpu", seed=1)
    errors = found.figures["max_error_to_cpu_float32"]
    assert found.problems == ()
    assert errors["float32"] == errors["float32_as_served"] == 0.0
    assert 0.0 < errors["bfloat16"] < 1.0
    assert errors["float32_graphs"] < 1e-5
    rows = found.figures["chunks"]
    assert len(rows) == 16
    assert all(row["ms_per_chunk"] > 0 for row in rows)


def test_a_vocoder_outside_its_tolerance_is_a_problem():
    # Equal waves differ by 0, which is above this.
    found = code2wav.run(replace(VOCODER, tolerance=-1.0), "cpu", seed=1)
    assert len(found.problems) == 2


def test_the_flow_agrees_with_itself_in_graphs_and_without():
    found = flow.run(flow.TINY, "cpu", seed=1)
    errors = found.figures["max_error_of_peak"]
    assert found.problems == ()
    assert errors["float32"] == 0.0 and errors["float32_graphs_to_eager"] < 1e-5
    assert 1e-4 < errors["bfloat16"] < 0.1
    rows = found.figures["batches"]
    assert len(rows) == 2 * 2 * 2
    assert all(row["ms"] > 0 and row["launch_ms"] > 0 for row in rows)


def test_a_flow_outside_its_tolerance_is_a_problem():
    found = flow.run(replace(flow.TINY, tolerance=-1.0), "cpu", seed=1)
    assert len(found.problems) == 2


def test_the_flow_has_the_parameters_of_cosyvoice_2():
    shape = flow.Options().shape
    assert shape == FlowShape(), "the defaults are the published sizes"
    tensors = random_flow(shape, 1)
    estimator = [x.numel() for name, x in tensors.items() if name.startswith("decoder.")]
    assert sum(estimator) == pytest.approx(71e6, rel=0.02)
    assert sum(x.numel() for x in random_hift(shape, 1).values()) == pytest.approx(20e6, rel=0.1)


def test_pages_return_intact_in_both_layouts():
    found = page_copy.run(PAGES, "cpu", seed=1)
    assert found.problems == ()
    assert found.figures["kv_bytes_per_token"] == 2 * 2 * 1 * 4 * 2
    rows = found.figures["copies"]
    assert {row["layout"] for row in rows} == {"one copy", "whole", "by_layer"}
    assert {row["page_tokens"] for row in rows} == {None, 2, 4}
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_transfers_of_sglang_return_pages_intact(monkeypatch):
    # What the plugins would put in for good.
    monkeypatch.setattr(write_back, "load_plugins", lambda: None)
    monkeypatch.setattr(mha, "transfer_kv_direct", kv_copy.HOOK, raising=False)
    found = write_back.run(TRANSFERS, "cpu", seed=1)
    assert found.problems == ()
    rows = found.figures["transfers"]
    assert [(row["page_tokens"], row["direction"]) for row in rows] == [
        (1, "to_host"),
        (1, "to_device"),
        (4, "to_host"),
        (4, "to_device"),
    ]
    assert all(row["gb_per_s"] > 0 for row in rows)


def test_memory_of_a_lender_is_read_by_the_borrower_and_outlives_it():
    found = shared_memory.run(shared_memory.TINY, "cpu", seed=1)
    assert found.problems == ()
    directions = [(row["tier"], row["direction"]) for row in found.figures["copies"]]
    assert directions == [("peer", "to_peer"), ("peer", "to_device")]


def test_a_page_damaged_in_transfer_is_detected():
    pages = page_copy.Pages(PAGES, 2, "pageable", "by_layer", torch.device("cpu"), seed=1)
    load = pages._load

    def load_and_damage():
        load()
        pages._pool[0, 0, 0] += 1

    pages._load = load_and_damage
    assert not pages.returned_intact()


def test_tf32_is_off_inside_exact_float32_and_as_before_outside():
    before = torch.backends.cudnn.allow_tf32
    with exact_float32():
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


def test_a_frame_with_one_different_code_is_not_equal():
    codes = np.array([[1, 2], [3, 4]])
    assert arms.equal_share(codes, codes) == 1.0
    assert arms.equal_share(codes, np.array([[1, 2], [3, 5]])) == 0.5


def test_arms_that_differ_are_problems():
    base = np.arange(8)
    turned = base.copy()
    turned[2:] = 0
    outputs = {"cpu": base, "float32": base, "bfloat16_eager": turned, "bfloat16": turned}
    figures, problems = arms.compare(outputs, "tokens")
    assert problems == []
    assert figures["tokens_equal_to_cpu_float32"]["bfloat16"] == 0.25
    assert figures["graph_equal_to_eager"] == {"bfloat16": 1.0}
    assert len(arms.lines_of(figures, "tokens")) == 4
    _, problems = arms.compare({**outputs, "float32": turned, "bfloat16": base}, "tokens")
    assert ["float32" in problems[0], "graph" in problems[1]] == [True, True]


def test_an_engine_on_the_cpu_has_no_arms_of_a_gpu():
    assert set(arms.arms_on("cpu")) == {"cpu", "float32"}
    on_gpu = arms.arms_on("cuda:1")
    assert {place for name, (place, _) in on_gpu.items() if name != "cpu"} == {"cuda:1"}
    assert "disable_cuda_graph" not in on_gpu["bfloat16"][1]


def test_a_server_gets_its_device():
    assert [places.indexed(name) for name in ("cpu", "cuda", "cuda:1")] == [
        *("cpu", "cuda:0", "cuda:1"),
    ]
    with places.on_device("cuda") as flags:
        assert "--vocoder.device=cuda:0" in flags
    with places.on_device("cpu") as flags:
        assert flags == ()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") != ""


WHOLE = TurnRecord(kind="speech", status="completed", audio_s=2.0, ttfp_ms=500.0)
INTERRUPTED = TurnRecord(
    kind="speech", status="cancelled", audio_s=1.0, interruption="barge_in", cut_short=True
)


def test_a_server_that_talks_and_stops_passes():
    found = server.judge({"platform": "cpu", "start_s": 9.0}, [WHOLE, INTERRUPTED, WHOLE])
    assert found.problems == ()
    assert found.figures["interrupted"]["cut_short"] is True


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([replace(WHOLE, status="failed", error="no"), INTERRUPTED, WHOLE], "whole response"),
        ([WHOLE, WHOLE, WHOLE], "not interrupted"),
        ([WHOLE, INTERRUPTED, replace(WHOLE, audio_s=0.0)], "last response"),
    ],
)
def test_a_server_that_does_not_talk_or_stop_is_a_problem(turns, words):
    (problem,) = server.judge({"platform": "cpu", "start_s": 9.0}, turns).problems
    assert words in problem


def test_places_that_wait_are_listed_by_their_number():
    documents = [
        {"engine": "talker", "places": [{"thread": "MainThread", "n": 3, "stack": ["a.py:1 f"]}]},
        {"engine": "thinker", "places": [{"thread": "MainThread", "n": 9, "stack": ["b.py:2 g"]}]},
    ]
    found = syncs.judge(documents, ())
    assert found.problems == ()
    assert [place["n"] for place in found.figures["places"]] == [9, 3]
    assert "b.py:2 g" in found.lines[2]
    assert "talker" in syncs.judge(documents[1:], ()).problems[0]


def test_a_load_without_audio_or_with_a_failed_turn_is_a_problem():
    def result(*records: TurnRecord) -> SimpleNamespace:
        rows = [SimpleNamespace(record=record, to_json=record.to_json) for record in records]
        return SimpleNamespace(
            rows=rows, late_frames=0.0, server_start_s=1.0, talker_frames=None, usage={}
        )

    found = voice_load.judge("cpu", result(WHOLE, INTERRUPTED))
    assert found.problems == ()
    assert (found.figures["n_turns"], found.figures["n_interrupted"]) == (2, 1)
    failed = replace(WHOLE, status="timeout", ttfp_ms=None)
    assert len(voice_load.judge("cpu", result(failed)).problems) == 2


def test_a_fit_finds_the_costs_that_made_its_times():
    rows = [[n, n * kv] for n in (1, 8, 32) for kv in (50, 2000)]
    times = [3.0 + 0.5 * n + 2e-5 * kv for n, kv in rows]
    assert constants.fit(rows, times) == pytest.approx([3.0, 0.5, 2e-5])


def test_measured_constants_are_a_device_model(tmp_path):
    place = torch.device("cpu")
    measured = {
        "link": constants.link(place, constants.TINY),
        "vocoder": constants.vocoder(place, constants.TINY, seed=1),
        "talker": constants.predictor(place, constants.TINY, seed=1),
        "thinker": {"decode_fixed_ms": constants.figure(-0.2, "a test")},
    }
    path = tmp_path / "measured.toml"
    path.write_text(constants.device_model("a test's device", measured))
    model = load_device_model(path)
    assert model.name == "a test's device"
    assert model.vocoder.fixed_ms == pytest.approx(measured["vocoder"]["fixed_ms"][0], rel=1e-5)
    assert "thinker.decode_fixed_ms" in model.estimates
    assert "thinker.kv_token_bytes" in model.estimates
    assert "link.to_host_gb_per_s" not in model.estimates


def test_every_check_has_tiny_sizes_and_a_place_in_the_script():
    script = (Path(__file__).parents[3] / "scripts/gpu_check.sh").read_text()
    listed = re.findall(r"^(?:CHECKS|FULL_SIZE)=\((.*?)\)$", script, re.MULTILINE | re.DOTALL)
    assert sorted(" ".join(listed).split()) == sorted(command.CHECKS)
    for name in command.CHECKS:
        check = importlib.import_module(f"benchmark.gpu.{name}")
        assert isinstance(check.TINY, check.Options)


def test_tiny_sizes_are_the_default_of_tiny_and_flags_override_them(tmp_path, monkeypatch):
    taken = []

    def run(options, device, seed):
        taken.append(options)
        return Findings({}, (), ())

    monkeypatch.setattr(page_copy, "run", run)
    words = ["page_copy", "--device", "cpu", "--out", str(tmp_path)]
    assert command.main([*words, "--tiny", "--layers", "7"]) == command.PASSED
    assert command.main(words) == command.PASSED
    assert taken == [replace(page_copy.TINY, layers=7), page_copy.Options()]


def test_a_check_that_passes_writes_a_document(tmp_path):
    flags = "--layers 1 --kv-heads 1 --head-dim 4 --page-tokens 2 --moved-bytes 64 --repeats 1"
    status = command.main(
        ["page_copy", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc", *flags.split()]
    )
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert status == command.PASSED
    assert path.name.startswith("page_copy_cpu_")
    assert (document["benchmark"], document["git_commit"]) == ("gpu_page_copy", "abc")
    assert (document["device"], document["seed"], document["passed"]) == ("cpu", 1, True)
    assert document["torch_version"] and document["date"] and document["figures"]["copies"]


@pytest.mark.parametrize(
    "result, status",
    [
        (Findings({}, ("the codes differ",), ()), command.FAILED),
        (RuntimeError("out of memory"), command.FAILED),
        (CannotRunError("sglang does not import"), command.CANNOT_RUN),
    ],
)
def test_exit_status_distinguishes_failure_from_inability_to_run(
    tmp_path, monkeypatch, result, status
):
    def run(options, device, seed):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(page_copy, "run", run)
    assert command.main(["page_copy", "--device", "cpu", "--out", str(tmp_path)]) == status
    documents = list(tmp_path.iterdir())
    assert len(documents) == (status == command.FAILED)


def test_a_missing_package_skips_the_check_and_names_it(monkeypatch, capsys):
    monkeypatch.setitem(command.CHECKS, "page_copy", ("torch", "no_such_package_here"))
    assert command.main(["page_copy"]) == command.CANNOT_RUN
    assert "no_such_package_here" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_is_skipped(capsys):
    assert command.main(["page_copy"]) == command.CANNOT_RUN
    assert "no NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "check, options",
    [
        (code_predictor, PREDICTOR),
        (code2wav, VOCODER),
        (flow, flow.TINY),
        (page_copy, PAGES),
    ],
)
def test_small_checks_pass_on_cuda(check, options):
    assert check.run(options, "cuda", seed=1).problems == ()
