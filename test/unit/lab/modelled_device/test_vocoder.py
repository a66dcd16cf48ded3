"""The vocoder on a modelled device."""

from types import SimpleNamespace

import torch

from lab.modelled_device import attach
from sglang_live.stages.vocoder.batcher import Decoding


def test_a_decode_has_arrived_when_its_modelled_time_has_passed(monkeypatch):
    costs_s: list[float] = []
    waited: list[bool] = []
    event = SimpleNamespace(synchronize=lambda: waited.append(True))
    device = SimpleNamespace(
        model=SimpleNamespace(vocoder=SimpleNamespace(decode_s=lambda n_chunks: 0.5 * n_chunks)),
        clock=SimpleNamespace(count_computation=lambda seconds: None),
        compute=lambda cost_s, launched_s: costs_s.append(cost_s) or event,
    )
    monkeypatch.setattr(attach, "modelled_device", lambda: device)
    decoded = Decoding(torch.tensor([1, 2, 3], dtype=torch.int16), [1, 3], None)
    batch = SimpleNamespace(codes=torch.zeros(2, 1, 1), jobs=[None, None])
    decoding = attach._launch_on_clock(lambda _batch: decoded, batch)
    assert decoding.pcm() == decoded.pcm()
    assert costs_s == [1.0] and waited == [True]


def test_the_end_of_a_job_costs_nothing():
    decoded = Decoding(torch.empty(0, dtype=torch.int16), [0], None)
    empty = SimpleNamespace(codes=None, jobs=[None])
    assert attach._launch_on_clock(lambda _batch: decoded, empty) is decoded
