"""The talker's state per request across changes of its row."""

import numpy as np
import pytest
import torch

from lab.cpu_graphs.tape import Tape
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream

PAD, HIDDEN, N_RESIDUAL, MAX_FRAMES = 9, 4, 3, 16


@pytest.fixture
def rows() -> TalkerRows:
    return TalkerRows(
        n_rows=4,
        max_frames=MAX_FRAMES,
        hidden=HIDDEN,
        n_codes=N_RESIDUAL,
        codec_vocab=20,
        pad_id=PAD,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def stream(rid: str = "r", text_ids: tuple[int, ...] = ()) -> TalkerStream:
    return TalkerStream(
        rid=rid,
        prompt_len=12,
        audio=None,
        audio_at=np.empty(0, np.int64),
        seed=77,
        greedy=False,
        temperature=0.9,
        penalty=1.05,
        text_ids=list(text_ids),
    )


def text_of(rows: TalkerRows, row: int) -> list[int]:
    return rows.text_ids[row].tolist()


def padded(*ids: int) -> list[int]:
    return [*ids, *[PAD] * (MAX_FRAMES - len(ids))]


def test_a_bound_row_has_the_values_of_its_request(rows):
    one = stream(text_ids=(1, 2))
    rows.bind(one, 3)
    assert one.row == 3
    assert (rows.prompt_len[3], rows.seed[3], rows.greedy[3]) == (12, 77, False)
    assert rows.penalty[3] == pytest.approx(1.05)
    assert text_of(rows, 3) == padded(1, 2)


def test_a_row_has_no_values_of_its_previous_request(rows):
    rows.bind(stream("before", text_ids=(1, 2, 3)), 2)
    rows.seen[2, 5] = True
    rows.bind(stream("after", text_ids=(4,)), 2)
    assert text_of(rows, 2) == padded(4)
    assert not rows.seen[2].any()


def test_binding_one_row_does_not_change_the_others(rows):
    rows.bind(stream("a", text_ids=(1,)), 1)
    rows.seen[1, 5] = True
    rows.bind(stream("b", text_ids=(2,)), 2)
    assert text_of(rows, 1) == padded(1)
    assert rows.seen[1].nonzero().tolist() == [[5]]


def test_a_row_is_bound_without_a_number_from_the_host(rows):
    one = stream("a", text_ids=())
    with Tape().recording():  # raises where CUDA would wait
        rows.bind(one, 3)
        one.n_dropped = 2
        rows.refresh(one)
    assert rows.n_dropped[3] == one.n_dropped_written == 2


def test_text_is_written_once_as_it_comes(rows):
    one = stream(text_ids=(1,))
    rows.bind(one, 1)
    rows.text_ids[1, 0] = 7  # would be 1 again if it were written twice
    one.text_ids += [2, 3]
    rows.write_text_ids(one)
    rows.write_text_ids(one)
    assert text_of(rows, 1) == padded(7, 2, 3)


def test_text_for_a_request_without_a_row_is_written_later(rows):
    one = stream()
    one.text_ids += [1]
    rows.write_text_ids(one)
    assert (rows.text_ids == PAD).all()
    rows.bind(one, 2)
    assert text_of(rows, 2) == padded(1)


def test_a_request_resumes_in_another_row_with_codes_hidden_state_and_text(rows):
    one = stream(text_ids=(1, 2, 3))
    rows.bind(one, 1)
    codes = torch.arange(2 * N_RESIDUAL, dtype=torch.int16).view(2, N_RESIDUAL)
    rows.codes[1, :2], rows.past_hidden[1] = codes, torch.arange(HIDDEN) + 0.5
    one.n_frames = 2
    rows.unbind(one)
    assert one.row is None
    one.text_ids += [4]  # text goes on meanwhile

    rows.bind(stream("tenant", text_ids=(8,)), 1)
    rows.codes[1], rows.past_hidden[1] = -1, -1
    rows.bind(one, 3)
    assert rows.codes[3, :2].tolist() == codes.tolist()
    assert rows.past_hidden[3].tolist() == [0.5, 1.5, 2.5, 3.5]
    assert text_of(rows, 3) == padded(1, 2, 3, 4)
    assert one.saved is None


def test_codes_that_another_engine_has_made_are_put_into_the_row(rows):
    begun = torch.arange(2 * (N_RESIDUAL + 1), dtype=torch.int16).view(2, N_RESIDUAL + 1)
    one = stream(text_ids=(1,))
    one.begun = begun
    rows.bind(one, 1)
    assert rows.codes[1, :2].tolist() == begun[:, 1:].tolist()
    assert one.begun is None


def test_unbinding_twice_keeps_what_the_first_one_saved(rows):
    one = stream()
    rows.bind(one, 1)
    rows.past_hidden[1] = 2.0
    rows.unbind(one)
    rows.unbind(one)
    rows.bind(one, 2)
    assert rows.past_hidden[2].tolist() == [2.0] * HIDDEN


def test_a_frame_has_text_until_the_known_text_ends_and_always_after_its_end():
    one = stream(text_ids=(1, 2))
    assert [one.has_text_for(frame) for frame in range(4)] == [True, True, False, False]
    one.text_done = True
    assert all(one.has_text_for(frame) for frame in range(4))


def test_frame_numbers_include_dropped_frames(rows):
    one = stream()
    rows.bind(one, 1)
    assert [one.frame_at(place) for place in (12, 15, 16, 40)] == [0, 3, 4, 28]
    one.drop(sink=16, n_frames=20)
    one.drop(sink=16, n_frames=8)
    assert [one.frame_at(place) for place in (12, 15, 16, 40)] == [0, 3, 32, 56]
    assert [one.dropped_before(place) for place in (15, 16)] == [0, 28]
    assert rows.n_dropped[1] == 0
    rows.refresh(one)
    assert rows.n_dropped.tolist() == [0, 28, 0, 0]


def test_a_request_resumes_with_its_dropped_and_seen_codes(rows):
    one = stream()
    rows.bind(one, 1)
    rows.seen[1, 5] = True
    one.drop(sink=16, n_frames=20)
    rows.unbind(one)
    rows.bind(stream("tenant"), 1)
    assert (rows.n_dropped[1], rows.seen[1].any()) == (0, False)
    rows.bind(one, 3)
    assert rows.n_dropped[3] == 20
    assert rows.seen[3].nonzero().tolist() == [[5]]
