"""The GPU checks at toy sizes, comparing the CPU with itself: results must be equal."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.pool_host import mha

from benchmark.gpu import __main__ as command
from benchmark.gpu import code2wav, code_predictor, page_copy, server, talker, write_back
from benchmark.gpu.findings import CannotRunError, Findings
from benchmark.gpu.measuring import exact_float32
from sglang_live.sgl_patches import kv_copy

PREDICTOR = code_predictor.Options(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=64,
    vocab=64,
    code_groups=5,
    batches=(1, 3),
    repeats=1,
)
VOCODER = code2wav.Options(
    hidden=32,
    intermediate=64,
    layers=2,
    heads=2,
    decoder_dim=32,
    codebook=64,
    window=4,
    checked_frames=11,
    batches=(1, 2),
    chunks=(1, 2),
    repeats=1,
)
PAGES = page_copy.Options(
    layers=2, kv_heads=1, head_dim=4, page_tokens=(2, 4), moved_bytes=1000, repeats=1
)
TRANSFERS = write_back.Options(
    layers=2, kv_heads=1, head_dim=4, page_tokens=(1, 4), moved_tokens=16, repeats=1
)


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
    rows = found.figures["chunks"]
    assert len(rows) == 8
    assert all(row["ms_per_chunk"] > 0 for row in rows)


def test_a_vocoder_outside_its_tolerance_is_a_problem():
    # Equal waves differ by 0, which is above this.
    found = code2wav.run(replace(VOCODER, tolerance=-1.0), "cpu", seed=1)
    assert len(found.problems) == 1


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
    assert talker.equal_share(codes, codes) == 1.0
    assert talker.equal_share(codes, np.array([[1, 2], [3, 5]])) == 0.5


def test_figures_of_the_demo_are_read_from_its_output():
    output = (
        "server ready after 41 s\n"
        "TTFP 812 ms from the end of the speech to the first audio "
        "(end of turn detected after 530 ms)\n"
        "reply 3.20 s, peak -3.1 dBFS, rms -20.0 dBFS\n"
    )
    assert server.figures_of(output) == {
        "ttfp_ms": 812,
        "end_of_turn_ms": 530,
        "reply_s": 3.2,
        "start_s": 41,
    }


def test_a_check_that_passes_writes_a_document(tmp_path):
    flags = "--layers 1 --kv-heads 1 --head-dim 4 --page-tokens 2 --moved-bytes 64 --repeats 1"
    status = command.main(
        ["page_copy", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc", *flags.split()]
    )
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert status == command.PASSED
    assert path.name.startswith("gpu_page_copy_cpu_")
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
    "check, options", [(code_predictor, PREDICTOR), (code2wav, VOCODER), (page_copy, PAGES)]
)
def test_small_checks_pass_on_cuda(check, options):
    assert check.run(options, "cuda", seed=1).problems == ()
