"""Device models are read whole or refused by name."""

import pytest

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.device_model.costs import (
    EagerCosts,
    LinkCosts,
    TalkerCosts,
    ThinkerCosts,
    VocoderCosts,
)
from sglang_live.extensions.planner.device_model.model import H100, load_device_model
from test.unit.extensions.planner.device_model.plain_model import TEXT

SHIPPED = H100.parent


def load(tmp_path, text: str | bytes):
    path = tmp_path / "device.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_device_model(path)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_model_has_a_source_for_every_figure_and_names_its_estimates(path):
    model = load_device_model(path)
    assert model.n_devices == 8
    assert len(model.digest) == 12
    assert "thinker.prefill_fixed_ms" in model.estimates
    assert "thinker.decode_fixed_ms" not in model.estimates
    assert model.facts()["modelled_device"] == model.name


def test_two_devices_of_the_same_figures_differ_in_their_digest(tmp_path):
    assert load(tmp_path, TEXT).digest != load(tmp_path, TEXT.replace("test", "other", 1)).digest


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[thinker]", "[thinkers]", "unknown: thinkers"),
        ("[vocoder]\nfixed_ms", "[vocoder]\nfixed_s", "unknown: vocoder.fixed_s"),
        ("prefill_fixed_ms = { value = 1, ", "prefill_fixed_ms = { value = 0, ", "thinker.prefill"),
        ("decode_fixed_ms = { value = 1, ", "decode_fixed_ms = { value = -3, ", "thinker.decode"),
        ("per_chunk_ms = { value = 1, ", "per_chunk_ms = { value = nan, ", "vocoder.per_chunk_ms"),
        ("per_chunk_ms = { value = 1, ", "per_chunk_ms = { value = inf, ", "vocoder.per_chunk_ms"),
        ("fixed_ms = { value = 1, ", 'fixed_ms = { value = "1", ', "decode_fixed_ms.value"),
        ("fixed_ms = { value = 1, ", "fixed_ms = { value = true, ", "decode_fixed_ms.value"),
        ("fixed_ms = { value = 1, ", "fixed_ms = { ", "missing: thinker.decode_fixed_ms.value"),
        ('value = 1, source = "test" }', "value = 1 }", "thinker.decode_fixed_ms.source"),
        ('source = "test"', 'source = " "', "thinker.decode_fixed_ms.source"),
        ('{ value = 1, source = "test" }', "1", "thinker.decode_fixed_ms must be {"),
        ("n_devices = 2\n", "", "missing: n_devices"),
        ("n_devices = 2", "n_devices = 0", "n_devices must be"),
        ("n_devices = 2", "n_devices = 1.5", "n_devices must be"),
        ('name = "test"', 'name = ""', "name must be"),
        ('name = "test"', "name = test", "line 1"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_the_figures(tmp_path, old, new, named):
    with pytest.raises(BadInputError) as error:
        load(tmp_path, TEXT.replace(old, new, 1))
    assert str(tmp_path / "device.toml") in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("missing", ["thinker", "talker", "vocoder", "link"])
def test_a_missing_stage_is_refused(tmp_path, missing):
    sections = TEXT.split("\n[")
    text = "\n[".join(part for part in sections if not part.startswith(f"{missing}]"))
    with pytest.raises(BadInputError, match=f"missing: {missing}"):
        load(tmp_path, text)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"absent\.toml: No such file"):
        load_device_model(tmp_path / "absent.toml")
    with pytest.raises(BadInputError, match="Is a directory"):
        load_device_model(tmp_path)
    with pytest.raises(BadInputError, match=r"device\.toml"):
        load(tmp_path, b"\xff\xfe")


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_its_devices_exist(tmp_path, device):
    load(tmp_path, TEXT).check_device(device)


@pytest.mark.parametrize("device", ["cuda:2", "cpu", "npu:0", "cuda:x", ""])
def test_other_devices_do_not_exist(tmp_path, device):
    with pytest.raises(ValueError, match="test has cuda:0 to cuda:1"):
        load(tmp_path, TEXT).check_device(device)


def test_costs_are_sums_of_their_parts():
    thinker = ThinkerCosts(
        decode_fixed_ms=10,
        decode_per_stream_ms=0.5,
        decode_per_kv_token_ns=100,
        prefill_fixed_ms=20,
        prefill_per_token_us=50,
        encoder_per_audio_s_ms=2,
        kv_token_bytes=1000,
        n_layers=4,
    )
    assert thinker.decode_s(4, 50_000) == pytest.approx(0.010 + 0.002 + 0.005)
    assert thinker.prefill_s(1000, 8.0) == pytest.approx(0.020 + 0.050 + 0.016)
    talker = TalkerCosts(
        decode_fixed_ms=10,
        decode_per_stream_ms=0.5,
        decode_per_kv_token_ns=100,
        code_predictor_fixed_ms=5,
        code_predictor_per_stream_ms=0.25,
        prefill_fixed_ms=20,
        prefill_per_token_us=50,
        kv_token_bytes=1000,
        n_layers=4,
    )
    assert talker.decode_s(4, 50_000) == pytest.approx(0.010 + 0.002 + 0.005 + 0.005 + 0.001)
    assert talker.prefill_s(1000, 8.0) == pytest.approx(0.020 + 0.050)
    assert VocoderCosts(fixed_ms=3, per_chunk_ms=0.5).decode_s(4) == pytest.approx(0.005)
    eager = EagerCosts(launch_ms=100, fixed_ms=20, per_code_us=50, per_pair_ns=200)
    assert eager.decode_s(2, 300) == pytest.approx(0.020 + 2 * (0.015 + 0.018))
    link = LinkCosts(
        to_device_gb_per_s=50,
        to_device_latency_us=10,
        to_host_gb_per_s=25,
        to_host_latency_us=20,
        peer_gb_per_s=250,
        peer_latency_us=5,
    )
    assert link.to_device_s(1e9) == pytest.approx(0.02001)
    assert link.to_host_s(1e9) == pytest.approx(0.04002)
    assert link.peer_s(1e9) == pytest.approx(0.004005)
