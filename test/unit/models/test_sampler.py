"""The sampler against transformers' processors, and against the papers' rules restated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sglang_live.models.speech_lm.sampler import (
    NO_CODE,
    Redraw,
    Repetition,
    Sampler,
    draws_of,
    occurrences,
)

N_CODES, N_DRAWS = 12, 30_000


def draws(n: int, seed: int = 0) -> torch.Tensor:
    return draws_of(torch.arange(n) + 1_000_003 * seed, torch.arange(n), 1)[:, 0]


def shares(codes: torch.Tensor, n_codes: int = N_CODES) -> torch.Tensor:
    return torch.bincount(codes, minlength=n_codes) / len(codes)


def random_logits(seed: int, n: int = 1) -> torch.Tensor:
    return 2.0 * torch.randn(n, N_CODES, generator=torch.Generator().manual_seed(seed))


FILTERS = [
    {},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.9},
    {"top_k": 8, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_codes_are_distributed_as_by_the_processors_of_transformers(filters, temperature):
    logits = random_logits(3)
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    chain.extend(warpers[name](value) for name, value in filters.items())
    expected = chain(None, logits.clone()).softmax(dim=-1)[0]
    codes = Sampler(**filters).choose(logits.expand(N_DRAWS, -1), temperature, None, draws(N_DRAWS))
    found = shares(codes)
    torch.testing.assert_close(found, expected, atol=0.012, rtol=0.0)
    assert not found[expected == 0].any(), "a code was drawn that is filtered out"


def test_each_request_has_its_own_temperature_and_a_greedy_one_takes_the_likeliest():
    logits = random_logits(5, 3)
    sampler, n = Sampler(), 4_000
    temperature = torch.tensor([0.01, 1.0, 1.0]).repeat(n)
    greedy = torch.tensor([False, False, True]).repeat(n)
    codes = sampler.choose(logits.repeat(n, 1), temperature, greedy, draws(3 * n)).view(n, 3)
    assert set(codes[:, 0].tolist()) == {int(logits[0].argmax())}
    assert set(codes[:, 2].tolist()) == {int(logits[2].argmax())}
    expected = logits[1].softmax(dim=-1)
    torch.testing.assert_close(shares(codes[:, 1]), expected, atol=0.03, rtol=0.0)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(n=st.integers(2, 7), at=st.integers(0, 6), seed=st.integers(0, 1000))
def test_a_draw_does_not_depend_on_who_shares_the_batch(n, at, seed):
    at %= n
    rules = dict(top_k=6, top_p=0.9, redraw=Redraw(window=4, least=1, excludes=True))
    sampler, logits = Sampler(**rules), random_logits(seed, n)
    rng = torch.Generator().manual_seed(seed)
    history = torch.randint(NO_CODE, N_CODES, (n, 4), generator=rng)
    temperature = torch.rand(n, generator=rng) + 0.3
    together = sampler.choose(logits, temperature, None, draws(n, seed), history)
    one = slice(at, at + 1)
    alone = sampler.choose(logits[one], temperature[one], None, draws(n, seed)[one], history[one])
    assert together[at] == alone[0]


def test_a_penalty_for_all_codes_is_that_of_transformers():
    logits = random_logits(7, 2)
    history = torch.tensor([[1, 4, 4, 7], [0, 2, 3, 5]])
    expected = RepetitionPenaltyLogitsProcessor(1.3)(history, logits.clone())
    seen = torch.zeros(2, N_CODES, dtype=torch.bool).scatter_(1, history, True)
    found = Sampler(repetition=Repetition()).penalised(logits, seen, torch.tensor([1.3, 1.3]))
    torch.testing.assert_close(found, expected)


def test_a_penalty_for_a_window_forgets_what_lies_before_it():
    logits = random_logits(8)
    history = torch.tensor([[3, 9, NO_CODE, 1, 4, 4]])
    sampler = Sampler(repetition=Repetition(window=3))
    found = sampler.penalised(logits, sampler.times(history, N_CODES), torch.tensor([1.5]))
    expected = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([[1, 4]]), logits.clone())
    torch.testing.assert_close(found, expected)


def test_a_penalty_as_a_product_counts_every_occurrence():
    """Zonos: its penalty of 3 over two codes is 9 for a code that fills both."""
    logits = torch.tensor([[2.0, -1.0, 4.0, 8.0], [2.0, -1.0, 4.0, 8.0]])
    history = torch.tensor([[2, 2], [1, 3]])
    sampler = Sampler(repetition=Repetition(window=2, product=True))
    found = sampler.penalised(logits, sampler.times(history, 4), torch.tensor([3.0, 3.0]))
    expected = torch.tensor([[2.0, -1.0, 4 / 9, 8.0], [2.0, -3.0, 4.0, 8 / 3]])
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="in a window"):
        Repetition(product=True)


def test_penalties_are_by_request_and_by_nothing_else_of_the_batch():
    logits = random_logits(9, 1).expand(3, -1)
    history = torch.tensor([[1, 2], [3, 4], [NO_CODE, NO_CODE]])
    sampler = Sampler(repetition=Repetition(window=2))
    penalty = torch.tensor([1.2, 2.0, 2.0])
    found = sampler.penalised(logits, sampler.times(history, N_CODES), penalty)
    for n in range(3):
        changed = (found[n] != logits[n]).nonzero().flatten().tolist()
        assert changed == [code for code in history[n].tolist() if code != NO_CODE]


def ras(logits: torch.Tensor, history: list[int], window: int, share: float) -> torch.Tensor:
    """CosyVoice's ras_sampling as shares: nucleus 0.8 of 25; a pick that repeats is masked, and
    the draw is from the whole softmax."""
    probabilities = logits.softmax(dim=-1)
    order = probabilities.argsort(descending=True)
    kept, mass = [], 0.0
    for code in order.tolist()[:25]:
        if mass >= 0.8:
            break
        kept.append(code)
        mass += float(probabilities[code])
    nucleus = torch.zeros_like(probabilities)
    nucleus[kept] = probabilities[kept] / mass
    result = torch.zeros_like(probabilities)
    for code in kept:
        if history[-window:].count(code) >= window * share:
            rest = logits.clone()
            rest[code] = -torch.inf
            result += nucleus[code] * rest.softmax(dim=-1)
        else:
            result[code] += nucleus[code]
    return result


def test_what_repeats_is_drawn_again_as_by_ras():
    logits = random_logits(11)
    likeliest = int(logits[0].argmax())
    history = [0, likeliest, 3, 3, 5, 5, 5, 5, 5, 5, 5, 5]
    assert history[-10:].count(likeliest) == 0, "outside of the window"
    history[4] = likeliest
    expected = ras(logits[0], history, 10, 0.1)
    sampler = Sampler(top_k=25, top_p=0.8, redraw=Redraw(window=10, least=1, excludes=True))
    codes = sampler.choose(
        logits.expand(N_DRAWS, -1),
        1.0,
        None,
        draws(N_DRAWS),
        torch.tensor(history).expand(N_DRAWS, -1),
    )
    assert expected[likeliest] < 0.1 < logits[0].softmax(-1)[likeliest]
    torch.testing.assert_close(shares(codes), expected, atol=0.012, rtol=0.0)


def test_a_redraw_may_take_the_same_code_and_ignores_the_temperature():
    """Higgs: a repetition is drawn again from the logits as they are."""
    logits = random_logits(12)
    likeliest = int(logits[0].argmax())
    history = torch.tensor([[likeliest, likeliest]])
    sampler = Sampler(redraw=Redraw(window=2, least=2, excludes=False))
    n = N_DRAWS
    codes = sampler.choose(logits.expand(n, -1), 0.001, None, draws(n), history.expand(n, -1))
    expected = logits[0].softmax(dim=-1)
    torch.testing.assert_close(shares(codes), expected, atol=0.012, rtol=0.0)
    once = torch.tensor([[NO_CODE, likeliest]]).expand(n, -1)
    assert set(sampler.choose(logits.expand(n, -1), 0.001, None, draws(n), once).tolist()) == {
        likeliest
    }


def test_a_code_that_is_not_allowed_is_never_drawn():
    logits = random_logits(13).index_fill(1, torch.tensor([2, 5]), -torch.inf)
    history = torch.full((1, 3), int(logits[0].argmax()))
    sampler = Sampler(redraw=Redraw(window=3, least=1, excludes=True))
    n = 5_000
    codes = sampler.choose(logits.expand(n, -1), 2.0, None, draws(n), history.expand(n, -1))
    assert not {2, 5} & set(codes.tolist())


def test_occurrences_are_counted_by_row():
    history = torch.tensor([[1, 1, NO_CODE], [0, 2, 1]])
    assert occurrences(history, 3).tolist() == [[0, 2, 0], [1, 1, 1]]
