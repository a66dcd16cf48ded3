"""Training conversations, and the loss of a doubtful answer."""

import math
import random

import pytest
import torch

from training.demo.conversations import partly_heard
from training.demo.convolved import ConvolvedClip
from training.demo.thinker import answering_loss

UNKNOWN_ID, RIGHT_ID, OTHER_ID = 0, 1, 2


def _loss(p_right: float, p_unknown: float, *, doubt: float, decides: bool = True) -> float:
    p_other = max(1 - p_right - p_unknown, 1e-9)
    logits = torch.tensor([[p_unknown, p_right, p_other]]).clamp(min=1e-9).log()
    labels, decision = torch.tensor([RIGHT_ID]), torch.tensor([decides])
    return float(answering_loss(logits, labels, decision, UNKNOWN_ID, doubt))


@pytest.mark.parametrize(("p_right", "says_unknown"), [(0.3, True), (0.55, True), (0.65, False)])
def test_unknown_costs_least_where_the_best_answer_is_less_likely_than_doubt(p_right, says_unknown):
    """In a share `p_right` of the cases the answer is right; in the others another one is."""

    def expected(p_answer: float) -> float:
        right = _loss(p_answer, 1 - p_answer, doubt=0.6)
        wrong = _loss(1e-9, 1 - p_answer, doubt=0.6)
        return p_right * right + (1 - p_right) * wrong

    shares = [k / 200 for k in range(1, 200)]
    best = min(shares, key=expected)
    assert (best < 0.1) == says_unknown, best


def test_elsewhere_it_is_cross_entropy():
    for doubt, decides in ((0.0, True), (0.6, False)):
        assert _loss(0.7, 0.2, doubt=doubt, decides=decides) == pytest.approx(-math.log(0.7))


class _Choosing(random.Random):
    """Draws that always blank a moment."""

    def random(self) -> float:
        return 0.0


def test_blanking_a_moment_leaves_the_recording_unchanged():
    rows = torch.arange(40.0).reshape(10, 4).half()
    clip = ConvolvedClip("words", rows.clone())
    heard = partly_heard(clip, _Choosing(1), share=0.5, places=3)
    assert torch.equal(clip.rows, rows)
    changed = (heard.rows != rows).any(1).sum()
    assert 1 <= changed <= 3
    assert len(heard.rows) == len(rows)
