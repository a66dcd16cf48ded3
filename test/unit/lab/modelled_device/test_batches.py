"""What a batch costs on a modelled device, and when its result exists."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from lab.modelled_device import batches, clock, device
from lab.modelled_device.batches import batch_cost_s, run_batch_on_clock
from lab.modelled_device.device import DEVICE_MODEL_ENV
from sglang_live.bridge.scheduler.batch_times import encoded_audio_s
from sglang_live.stages.spec import SPEC_ENV, StageSpec
from test.unit.extensions.planner.device_model.plain_model import TEXT


def audio_request(*clips: tuple[int, int]) -> SimpleNamespace:
    """clips: (first, last) token of each."""
    items = [MultimodalDataItem(modality=Modality.AUDIO, offsets=[clip]) for clip in clips]
    return SimpleNamespace(multimodal_inputs=MultimodalInputs(mm_items=items))


def prefill(*chunks: tuple[SimpleNamespace, int, int]) -> SimpleNamespace:
    """chunks: request, tokens before the chunk, tokens of it."""
    reqs, prefixes, lengths = zip(*chunks, strict=True)
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=reqs,
        prefix_lens=prefixes,
        extend_lens=lengths,
        extend_num_tokens=sum(lengths),
    )


def decode(*lengths: int) -> SimpleNamespace:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        reqs=[None] * len(lengths),
        seq_lens_cpu=torch.tensor(lengths),
    )


def thinker_spec(run_dir) -> StageSpec:
    return StageSpec(
        stage="thinker",
        replica=0,
        model_path="m",
        family="f",
        cache_dir=str(run_dir),
        address="a",
        same_host=True,
        run_dir=str(run_dir),
        served_name="m",
        device="cuda:0",
    )


TEXT_REQUEST = SimpleNamespace(multimodal_inputs=None)


def test_a_clip_is_encoded_in_the_chunk_in_which_it_begins():
    clips = audio_request((5, 29), (40, 64))  # 25 tokens each: two seconds
    assert encoded_audio_s(prefill((clips, 0, 30))) == pytest.approx(2.0)
    assert encoded_audio_s(prefill((clips, 30, 5))) == 0.0
    assert encoded_audio_s(prefill((clips, 10, 40))) == pytest.approx(2.0)
    both = prefill((clips, 0, 70), (TEXT_REQUEST, 0, 10), (audio_request((0, 11)), 0, 12))
    assert encoded_audio_s(both) == pytest.approx(2.0 + 2.0 + 0.96)


@pytest.fixture
def modelled(monkeypatch, tmp_path):
    path = tmp_path / "device.toml"
    path.write_text(
        TEXT.replace("decode_fixed_ms = { value = 1,", "decode_fixed_ms = { value = 40,")
    )
    monkeypatch.setenv(DEVICE_MODEL_ENV, str(path))
    monkeypatch.setenv(SPEC_ENV, thinker_spec(tmp_path).to_env())
    device.modelled_device.cache_clear()
    yield device.modelled_device()
    device.modelled_device.cache_clear()


def test_costs_follow_the_batch(modelled):
    costs = modelled.engine_costs
    assert batch_cost_s(decode(100, 200), costs) == costs.decode_s(2, 300)
    chunk = prefill((audio_request((0, 24)), 0, 30), (TEXT_REQUEST, 5, 7))
    assert batch_cost_s(chunk, costs) == costs.prefill_s(37, 2.0)
    assert batch_cost_s(SimpleNamespace(forward_mode=ForwardMode.IDLE), costs) is None


def test_a_result_exists_when_the_modelled_time_of_its_batch_has_passed(modelled, monkeypatch):
    now_s = [100.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    time = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    for module in (batches, clock):
        monkeypatch.setattr(module, "time", time)

    def run(scheduler, batch):
        sleep(0.01)  # the small model computes
        return SimpleNamespace(copy_done=None)

    first = run_batch_on_clock(run, None, decode(10))
    second = run_batch_on_clock(run, None, decode(11))
    cost_s = modelled.engine_costs.decode_s(1, 10)
    first.copy_done.synchronize()
    assert now_s[0] == pytest.approx(100.0 + cost_s)
    second.copy_done.synchronize()
    assert now_s[0] == pytest.approx(100.0 + 2 * cost_s)
    report = modelled.clock.report()
    assert report["device_batches"] == 2 and report["device_late_batches"] == 0
    assert report["device_computed_s"] == pytest.approx(0.02)
    assert report["device_waited_s"] == pytest.approx(2 * cost_s - 0.02)


def test_an_empty_batch_takes_no_time(modelled):
    idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    result = run_batch_on_clock(lambda *_: SimpleNamespace(copy_done=None), None, idle)
    assert result.copy_done is None
