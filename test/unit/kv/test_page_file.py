"""A read returns what was written, or reports that it does not."""

import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_live.kv.page_file import PageFile

PAGE = 64
N_PLACES = 6


def page(value: int) -> np.ndarray:
    return np.full(PAGE, value, np.uint8)


@pytest.fixture
def file(tmp_path):
    file = PageFile(tmp_path, PAGE, N_PLACES * PAGE + 1)
    yield file
    file.close()


def read(file: PageFile, place: int) -> np.ndarray | None:
    into = np.zeros(PAGE, np.uint8)
    return into if file.read(place, into) else None


def test_it_has_no_name_in_its_folder(file, tmp_path):
    file.write(file.take(1)[0], page(1))
    assert list(tmp_path.iterdir()) == []


def test_no_more_places_are_taken_than_there_are(file):
    assert file.n_free == N_PLACES
    assert file.take(N_PLACES + 1) is None
    places = file.take(N_PLACES)
    assert sorted(places) == list(range(N_PLACES))
    assert file.take(1) is None
    file.free(places[2:4])
    assert sorted(file.take(2)) == sorted(places[2:4])


@pytest.mark.parametrize("damage", ["a bit", "cut short"])
def test_damage_is_detected(file, damage):
    places = file.take(2)
    for place in places:
        file.write(place, page(7))
    fd = file._file.fileno()
    if damage == "a bit":
        os.pwrite(fd, bytes([6]), places[1] * PAGE + 13)
    else:
        os.ftruncate(fd, places[1] * PAGE + 13)
    assert read(file, places[0]).tolist() == page(7).tolist()
    assert read(file, places[1]) is None


def test_a_file_smaller_than_a_page_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no room"):
        PageFile(tmp_path, PAGE, PAGE - 1)
    with pytest.raises(OSError):
        PageFile(tmp_path / "absent", PAGE, PAGE)


class Places(RuleBasedStateMachine):
    """Pages by place, as they should be."""

    def __init__(self):
        super().__init__()
        self.file = PageFile(".", PAGE, N_PLACES * PAGE)
        self.taken: set[int] = set()
        self.written: dict[int, int] = {}

    @rule(n=st.integers(1, 3))
    def take(self, n):
        places = self.file.take(n)
        if places is None:
            assert n > N_PLACES - len(self.taken)
            return
        assert len(places) == len(set(places)) == n
        assert not self.taken & set(places)
        self.taken |= set(places)

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), value=st.integers(0, 255))
    def write(self, data, value):
        place = data.draw(st.sampled_from(sorted(self.taken)))
        self.file.write(place, page(value))
        self.written[place] = value

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        place = data.draw(st.sampled_from(sorted(self.taken)))
        self.file.free([place])
        self.taken.discard(place)
        self.written.pop(place, None)

    @invariant()
    def all_is_there(self):
        assert self.file.n_free == N_PLACES - len(self.taken)
        for place, value in self.written.items():
            assert read(self.file, place).tolist() == page(value).tolist()

    def teardown(self):
        self.file.close()


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=30, stateful_step_count=20)


def test_pages_that_the_system_moves_in_parts_arrive_whole(file, monkeypatch):
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, left, at: pwrite(fd, left[:10], at))
    monkeypatch.setattr(os, "preadv", lambda fd, left, at: preadv(fd, [left[0][:10]], at))
    whole = np.arange(PAGE, dtype=np.uint8)
    places = file.take(2)
    for place in places:
        file.write(place, whole + place)
    for place in places:
        assert read(file, place).tolist() == (whole + place).tolist()


def test_freed_places_are_taken_before_new_ones(file):
    first = file.take(2)
    file.free(first)
    assert sorted(file.take(3)) == [0, 1, 2]
    assert file.n_free == N_PLACES - 3


def test_a_file_of_one_page_has_one_place(tmp_path):
    file = PageFile(tmp_path, PAGE, PAGE)
    assert (file.n_places, file.n_free) == (1, 1)
    file.close()
