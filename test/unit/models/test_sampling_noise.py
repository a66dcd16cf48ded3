"""Sampling noise: its distribution and independence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.models.speech_lm.sampler import TABLE_SIZE, GumbelTable, draws_of

N_IDS = 50
seeds = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(scope="module")
def gumbel() -> GumbelTable:
    return GumbelTable()


@settings(max_examples=40)
@given(st.lists(st.tuples(seeds, st.integers(0, 4095)), min_size=1, max_size=6))
def test_draws_do_not_depend_on_the_other_requests_of_the_batch(streams):
    seed, frame = (torch.tensor(values) for values in zip(*streams, strict=True))
    together = draws_of(seed, frame, 3)
    for n in range(len(streams)):
        alone = draws_of(seed[n : n + 1], frame[n : n + 1], 3)
        assert torch.equal(together[n : n + 1], alone)
    assert int(together.min()) >= 0
    assert int(together.max()) < TABLE_SIZE


def test_noise_belongs_to_the_id_at_any_rank(gumbel):
    draw = draws_of(torch.arange(3), torch.arange(3), 1)[:, 0]
    ids = torch.randint(0, 2048, (3, N_IDS), generator=torch.Generator().manual_seed(0))
    noise = gumbel(draw, ids)
    assert noise.isfinite().all()
    assert torch.equal(gumbel(draw, ids.flip(1)), noise.flip(1))


def many(gumbel: GumbelTable, n_frames: int = 300, seed: int = 5) -> torch.Tensor:
    """[n_frames, 15, N_IDS] noise of one stream."""
    frame = torch.arange(n_frames)
    draws = draws_of(torch.full_like(frame, seed), frame, 15)
    ids = torch.arange(N_IDS).expand(draws.numel(), -1)
    return gumbel(draws.flatten(), ids).view(n_frames, 15, N_IDS)


@pytest.mark.parametrize("seed", [0, 1, 2**56 - 1])
def test_noise_is_distributed_as_gumbel(gumbel, seed):
    noise = many(gumbel, seed=seed)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.02)
    # Uniform again through the distribution function: every tenth holds a tenth.
    share = torch.histc(torch.exp(-torch.exp(-noise)), bins=10, min=0, max=1) / noise.numel()
    torch.testing.assert_close(share, torch.full((10,), 0.1), atol=0.003, rtol=0)


def test_adjacent_frames_seeds_steps_and_ids_are_independent(gumbel):
    noise = many(gumbel)
    pairs = [
        (noise[1:], noise[:-1]),
        (noise[:, 1:], noise[:, :-1]),
        (noise[..., 1:], noise[..., :-1]),
        (noise, many(gumbel, seed=6)),
    ]
    for one, other in pairs:
        together = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))
        assert abs(together[0, 1].item()) < 0.01


def test_no_two_frames_of_a_long_request_share_their_noise():
    frame = torch.arange(4096)
    draws = draws_of(torch.full_like(frame, 5), frame, 15)
    assert len(draws.unique(dim=0)) == 4096
