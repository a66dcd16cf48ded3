import pytest

from lab import lending
from sglang_live.extensions.lending.engine import part as product
from sglang_live.extensions.lending.policy import LendingConfig


def attach(monkeypatch, **constants) -> None:
    monkeypatch.setattr(product, "LendingConfig", LendingConfig)  # to be restored
    for name, value in lending.environment(**constants).items():
        monkeypatch.setenv(name, value)
    lending.attach("sglang")


def test_a_lender_has_the_constants_of_the_test(monkeypatch):
    attach(monkeypatch, calm_s=0.5, n_runs=8)
    assert product.LendingConfig() == LendingConfig(calm_s=0.5, n_runs=8)


@pytest.mark.parametrize("wrong", [{"calm": 1}, {"n_runs": 0}])
def test_constants_that_are_none_are_refused(monkeypatch, wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        attach(monkeypatch, **wrong)
