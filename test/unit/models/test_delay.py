"""Marks that a step has to have, and frames that it completes, in a pattern with a delay."""

import torch

from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.speech_lm.sampler import NO_CODE

DELAY = Delay(n_books=3, n_codes=10, begin_id=10, end_id=11)
ANY = NO_CODE


def history(*steps: list[int], window: int = 4) -> torch.Tensor:
    """Of one stream: [1, window, n_books]."""
    none = [[NO_CODE] * 3] * (window - len(steps))
    return torch.tensor([[*none, *steps[-window:]]])


def forced(*steps: list[int]) -> list[int]:
    n_ending = DELAY.n_ending(history(*steps))
    return DELAY.forced(torch.tensor([len(steps)]), n_ending)[0].tolist()


def completed(steps: list[list[int]], codes: list[int]) -> list[int]:
    step = torch.tensor([len(steps)])
    return DELAY.completed(step, history(*steps), torch.tensor([codes]))[0].tolist()


def test_a_book_has_marks_until_the_step_of_its_first_code():
    steps = [[1, 10, 10], [2, 3, 10]]
    assert forced() == [ANY, 10, 10]
    assert forced(*steps[:1]) == [ANY, ANY, 10]
    assert forced(*steps) == [ANY, ANY, ANY]


def test_a_frame_is_complete_with_the_code_of_the_last_book():
    steps = [[1, 10, 10], [2, 3, 10], [4, 5, 6], [7, 8, 9]]
    assert completed(steps[:0], steps[0]) == [NO_CODE] * 3
    assert completed(steps[:1], steps[1]) == [NO_CODE] * 3
    assert completed(steps[:2], steps[2]) == [1, 3, 6]
    assert completed(steps[:3], steps[3]) == [2, 5, 9]


def test_the_first_end_of_any_book_ends_one_book_after_the_other():
    steps = [[1, 10, 10], [2, 3, 10], [4, 5, 6], [7, 11, 8]]
    assert forced(*steps) == [11, ANY, ANY]
    steps.append([11, 1, 2])
    assert forced(*steps) == [11, 11, ANY]
    steps.append([11, 11, 3])
    assert forced(*steps) == [11, 11, 11]


def test_a_mark_in_the_place_of_a_code_is_the_nearest_code():
    steps = [[1, 10, 10], [2, 3, 10], [4, 5, 6], [11, 11, 8]]
    assert completed(steps, [11, 7, 1]) == [4, 9, 1]


def test_streams_of_different_ages_share_a_batch():
    young, old = history([1, 10, 10]), history([1, 10, 10], [2, 3, 10], [4, 5, 6], [11, 1, 2])
    step = torch.tensor([1, 4])
    found = DELAY.forced(step, DELAY.n_ending(torch.cat((young, old))))
    assert found.tolist() == [[ANY, ANY, 10], [11, ANY, ANY]]


def test_an_end_of_one_step_wanders_through_the_books():
    delay = Delay(n_books=3, n_codes=10, begin_id=11, end_id=10, marks_end=True)

    def forced(*steps: list[int]) -> list[int]:
        n_ending = delay.n_ending(history(*steps))
        return delay.forced(torch.tensor([len(steps)]), n_ending)[0].tolist()

    steps = [[1, 11, 11], [2, 3, 11], [4, 5, 6], [10, 8, 9]]
    assert forced(*steps) == [11, 10, ANY]
    steps.append([11, 10, 7])
    assert forced(*steps) == [11, 11, 10]
    ends = delay.ends(torch.tensor([*steps, [11, 11, 10]]))
    assert ends.tolist() == [False] * 5 + [True]
