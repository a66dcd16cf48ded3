"""A stopped training resumes at its step; the halves of a batch give the batch's gradient."""

import pytest
import torch
from torch import nn

from training.demo.schedule import ResumableSteps, Shares, cosine, step_generator


def train(resumable: ResumableSteps, n: int, stop_before: int | None = None) -> nn.Module:
    torch.manual_seed(1)
    module = nn.Linear(4, 1)
    optimiser = torch.optim.AdamW(module.parameters(), 0.01)
    for step in resumable.steps(n, module, optimiser):
        if step == stop_before:
            return module
        x = torch.randn(8, 4, generator=step_generator(5, step))
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    return module


@pytest.mark.parametrize("stop_before", [0, 499, 500, 1201])
def test_a_stopped_training_ends_with_the_weights_of_an_unstopped_one(tmp_path, stop_before):
    resumable = ResumableSteps(tmp_path / "resumable")
    train(resumable, 1300, stop_before)
    resumed, whole = train(resumable, 1300), train(ResumableSteps(), 1300)
    assert torch.equal(resumed.weight, whole.weight)
    assert not list(tmp_path.iterdir())


def test_the_learning_rate_rises_and_falls():
    rates = [cosine(step, 1000, warm_up=100) for step in range(1000)]
    assert rates.index(max(rates)) == pytest.approx(100, abs=5)
    assert rates[0] < 0.02 and rates[-1] == pytest.approx(0.03, abs=0.01)


def test_shares_give_the_gradient_of_the_whole_batch():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    unused = nn.Parameter(torch.zeros(3))
    x = torch.randn(Shares.N, 16, 4)

    def loss_of(share: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = module(x[share])
        return made.square().mean(), (made > 0).float().mean()

    parameters = [*module.parameters(), unused]
    loss, right = Shares().gradients(parameters, loss_of)
    shared = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    whole = module(x.flatten(0, 1))
    whole.square().mean().backward()
    for ours, parameter in zip(shared, module.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
    assert unused.grad is None
    assert float(loss) == pytest.approx(float(whole.square().mean()), rel=1e-5)
    assert float(right) == pytest.approx(float((whole > 0).float().mean()))


def test_the_number_of_threads_does_not_change_the_result():
    def trained(n_threads: int) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(n_threads)
        try:
            torch.manual_seed(1)
            module, shares = nn.Linear(4, 1), Shares()
            optimiser = torch.optim.AdamW(module.parameters(), 0.01)

            def loss_of(share: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
                x = torch.randn(8, 4, generator=step_generator(share, step))
                made = module(x)
                return (made - x.sum(1, keepdim=True)).square().mean(), made.mean()

            for step in range(40):
                shares.gradients(list(module.parameters()), lambda s, step=step: loss_of(s, step))
                optimiser.step()
            return module.weight.detach()
        finally:
            torch.set_num_threads(before)

    assert torch.equal(trained(1), trained(2))
