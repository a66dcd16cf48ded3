"""The copies that are evicted from a host under memory pressure."""

from types import SimpleNamespace

import pytest

from sglang_live.bridge.session.idle import IdleSessions
from sglang_live.bridge.tiers.host_copies import HostCopies
from sglang_live.bridge.tiers.host_eviction import HostEviction
from sglang_live.bridge.tiers.storage import NoStorage, StoredTails
from sglang_live.kv.page_file import PageFile
from sglang_live.messages import NextUseHint
from test.unit.bridge.fake_host import FakeCache

from .host_talk import Talk, acknowledge
from .test_storage import BYTES_PER_VALUE, settle

PAGE = 4
HOST_TOKENS = 48


class Host:
    """Sessions without any KV left on the device."""

    def __init__(self, file: PageFile | None):
        self.cache = FakeCache(PAGE, HOST_TOKENS)
        self.copies = HostCopies(self.cache)
        self.stored = NoStorage()
        if file is not None:
            self.stored = StoredTails(self.copies, file, lambda numbers: numbers)
        self.idle = IdleSessions(PAGE)
        self.idle.tick(100.0)
        self.talks: dict[str, Talk] = {}
        sessions = SimpleNamespace(idle=self.idle, slots={})
        self.room = HostEviction(sessions, self.copies, self.stored)
        self._slots = sessions.slots

    def holds(self, name: str, n_tokens: int, needed_in_s: float, on_device: bool = False) -> None:
        talk = self.talks[name] = Talk(self.cache, self.copies, name, len(self.talks) % 2)
        self._slots[name] = SimpleNamespace(kv=talk.kv)
        self.idle.expect(NextUseHint(name, needed_in_s, 0.0, None))
        talk.turn(n_tokens)
        if on_device:
            talk.write()
        else:
            talk.evict(0)
        acknowledge(self.cache, self.copies)
        self.room.used(name)

    def length(self, name: str) -> int:
        copy = self.copies.of(name)
        return 0 if copy is None else copy.end - copy.begin


@pytest.fixture
def host():
    return Host(None)


def test_the_session_expected_last_loses_the_end_of_its_copy(host):
    host.holds("late", 24, needed_in_s=60.0)
    host.holds("soon", 16, needed_in_s=1.0)
    host.holds("new", 16, needed_in_s=20.0)
    assert (host.length("late"), host.length("soon"), host.length("new")) == (16, 16, 16)
    assert host.room.counts == {"tokens_dropped_on_host": 8, "dropped_tokens_lost": 8}
    assert host.talks["late"].on_host() == host.talks["late"].values[:16]


def test_a_session_expected_later_than_all_others_evicts_none(host):
    host.holds("soon", 24, needed_in_s=1.0)
    host.holds("sooner", 16, needed_in_s=0.5)
    host.holds("late", 16, needed_in_s=60.0)
    assert (host.length("soon"), host.length("sooner"), host.length("late")) == (24, 16, 0)
    assert host.copies.counts["writes_host_full"] > 0
    assert host.room.counts["tokens_dropped_on_host"] == 0


def test_dropped_tokens_that_are_also_on_the_device_are_not_lost(host):
    host.holds("late", 24, needed_in_s=60.0, on_device=True)
    host.holds("soon", 32, needed_in_s=1.0)
    assert host.length("late") == 16
    assert host.room.counts == {"tokens_dropped_on_host": 8, "dropped_tokens_lost": 0}


def test_a_copy_in_transfer_is_not_dropped(host):
    host.holds("late", 24, needed_in_s=60.0)
    host.talks["late"].preload()
    host.holds("soon", 32, needed_in_s=1.0)
    assert host.length("late") == 24
    assert host.length("soon") == 0


def test_without_hints_the_least_recently_used_copy_is_evicted(host):
    for name in ("old", "newer"):
        talk = host.talks[name] = Talk(host.cache, host.copies, name, len(host.talks))
        host._slots[name] = SimpleNamespace(kv=talk.kv)
        talk.turn(16)
        talk.evict(0)
        acknowledge(host.cache, host.copies)
        host.room.used(name)
        host.idle.tick(host.idle.now_s + 5.0)
    host.room.changed("old")  # as after a deferral: it was not used
    host.holds("new", 20, needed_in_s=1.0)
    assert (host.length("old"), host.length("newer")) == (12, 16)


# --- storage ---


@pytest.fixture
def roomy(tmp_path):
    n_bytes = HOST_TOKENS * BYTES_PER_VALUE
    file = PageFile(tmp_path, PAGE * BYTES_PER_VALUE, n_bytes)
    yield Host(file)
    file.close()


def test_tails_go_to_storage_before_the_host_is_full(roomy):
    roomy.holds("soon", 12, needed_in_s=1.0)
    roomy.holds("late", 24, needed_in_s=60.0)
    roomy.room.store_if_short()
    assert roomy.stored.n_storing_tokens == 0  # a quarter is free
    roomy.holds("more", 8, needed_in_s=30.0)
    roomy.room.store_if_short()
    roomy.room.store_if_short()
    # Until a fifth is free; pages being stored already count as free.
    assert roomy.stored.n_storing_tokens == 8
    for name in settle(roomy.stored):
        roomy.room.changed(name)
    assert (roomy.length("late"), roomy.stored.end_of("late", 16)) == (16, 24)
    assert roomy.cache.host_pool_group.available_size() == 12
    roomy.room.store_if_short()
    assert roomy.stored.n_storing_tokens == 0
    assert roomy.room.counts["tokens_dropped_on_host"] == 0


def test_a_tail_without_the_tokens_before_it_is_dropped_too(roomy):
    roomy.holds("late", 44, needed_in_s=60.0)
    roomy.room.store_if_short()
    settle(roomy.stored)
    roomy.room.changed("late")
    roomy.holds("soon", 40, needed_in_s=1.0)
    assert roomy.length("soon") == 40
    assert roomy.stored.end_of("late", -1) == -1
