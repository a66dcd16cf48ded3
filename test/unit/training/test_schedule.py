"""A training that was stopped goes on where it was."""

import pytest
import torch
from torch import nn

from training.demo.schedule import Course, cosine


def train(course: Course, n: int, stop_before: int | None = None) -> nn.Module:
    torch.manual_seed(1)
    module = nn.Linear(4, 1)
    optimiser = torch.optim.AdamW(module.parameters(), 0.01)
    choose = torch.Generator().manual_seed(5)
    for step in course.steps(n, module, optimiser, choose):
        if step == stop_before:
            return module
        x = torch.randn(8, 4, generator=choose)
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return module


@pytest.mark.parametrize("stop_before", [0, 499, 500, 1201])
def test_a_stopped_training_ends_as_one_that_was_not(tmp_path, stop_before):
    course = Course(tmp_path / "course")
    train(course, 1300, stop_before)
    resumed, whole = train(course, 1300), train(Course(), 1300)
    assert torch.equal(resumed.weight, whole.weight)
    assert not list(tmp_path.iterdir())


def test_the_learning_rate_rises_and_falls():
    rates = [cosine(step, 1000, warm_up=100) for step in range(1000)]
    assert rates.index(max(rates)) == pytest.approx(100, abs=5)
    assert rates[0] < 0.02 and rates[-1] == pytest.approx(0.03, abs=0.01)
