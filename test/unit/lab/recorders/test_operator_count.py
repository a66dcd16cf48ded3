"""Launches of a forward pass, by module."""

import json
from types import SimpleNamespace

import torch
from torch import nn

from lab.recorders.operator_count import TRITON, ForwardCounter


class Doubled(nn.Module):
    def forward(self, x):
        return (x + x).view(-1).reshape(2, -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.doubled = Doubled()

    def forward(self, x):
        return self.doubled(x) * torch.empty(2, 3).fill_(2.0)


def test_what_looks_at_memory_launches_nothing(tmp_path):
    counter = ForwardCounter(tmp_path / "thinker.jsonl")
    runner = SimpleNamespace(model=Model())
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_decode=lambda: True), input_ids=torch.zeros(2)
    )

    def kernel():
        return torch.ones(3) + 1  # as an interpreter of kernels does

    def forward(runner, batch):
        counter.launch(kernel)
        return runner.model(torch.ones(2, 3))

    for _ in range(2):
        counter.forward(forward, runner, batch)
    lines = [json.loads(line) for line in (tmp_path / "thinker.jsonl").read_text().splitlines()]
    for line in lines:
        assert (line["is_decode"], line["n_tokens"]) == (True, 2)
        assert sorted(map(tuple, line["by_module"])) == [
            ("Doubled", "add", 1),
            ("Model", "fill_", 1),
            ("Model", "mul", 1),
            ("Model", "ones", 1),
            ("Model", TRITON, 1),
        ]
