"""Claims about transfers between pools and lent pages."""

import os
import random
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.l2_transfer")
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine  # noqa: E402

from lab.lending import overwrite_lent  # noqa: E402
from sglang_live.extensions.lending.engine.peer_pool import (  # noqa: E402
    PEER_SLOTS,
    MoveToHost,
    PeerPool,
    PeerPools,
)
from sglang_live.extensions.lending.engine.shared_buffers import shared_buffers  # noqa: E402
from sglang_live.extensions.lending.engine.shared_memory import map_shared  # noqa: E402
from sglang_live.extensions.lending.layout import Geometry, Memory, slots_in  # noqa: E402
from sglang_live.extensions.lending.slots import PeerSlots  # noqa: E402

BORROWER = Geometry(
    dtype="float32", layout="nhd", n_layers=3, n_heads=2, k_dim=8, v_dim=8, page_size=1
)
ROWS = 200
CPU = torch.device("cpu")
LENT = (50, 100)


class FakeDevice:
    """A device's pool: one tensor per layer."""

    store_dtype = torch.float32

    def __init__(self, n_slots: int):
        shape = (n_slots, BORROWER.n_heads, BORROWER.k_dim)
        self.k_buffer = [torch.zeros(shape) for _ in range(BORROWER.n_layers)]
        self.v_buffer = [torch.zeros(shape) for _ in range(BORROWER.n_layers)]


class World:
    """A lender of another geometry, and the borrower's pools."""

    def __init__(self):
        shapes = [(ROWS, 2, 8)] * 4
        shared, self.lent = shared_buffers(shapes, torch.bfloat16, CPU)
        n_bytes = shared.shared.n_bytes
        self.memory = Memory(offsets=shared.offsets, row_bytes=shared.row_bytes, n_bytes=n_bytes)
        self.device = FakeDevice(64)
        self.host = FakeDevice(64)
        entry = SimpleNamespace(device_pool=self.device, layer_mapper=None)
        self.controller = SimpleNamespace(
            mem_pool_host=SimpleNamespace(anchor_entry=entry),
            _l2_transfers=lambda slots, device, others=None: [("host", slots, device)][
                : len(slots)
            ],
        )
        self.pools = PeerPools(self.controller)
        raw = map_shared(shared.shared.fd, n_bytes, CPU).raw
        self.base = self.pools.add(PeerPool(raw, BORROWER, self.device))
        slots = slots_in(self.memory.ranges(*LENT), BORROWER.envelope_bytes)
        self.slots = self.base + torch.from_numpy(slots)

    def run(self, slots, device, *, load: bool) -> None:
        """Through SGLang's own transfer engine."""
        engine = L2TransferEngine("direct")
        transfers = self.controller._l2_transfers(slots, device)
        if load:
            n_layers = BORROWER.n_layers
            engine.submit_host_to_device(transfers, transfer_layer_id_max=n_layers)
        else:
            engine.submit_device_to_host(transfers)


@pytest.fixture
def world() -> World:
    return World()


def fill(pool: FakeDevice) -> None:
    for n, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 1000.0 * n)


def rows_of(pool: FakeDevice, slots) -> torch.Tensor:
    return torch.stack([buffer[slots] for buffer in (*pool.k_buffer, *pool.v_buffer)])


def test_tokens_come_back_unchanged_and_only_lent_rows_are_written(world):
    fill(world.device)
    n = len(world.slots)
    assert n == 32  # 100 slots of 32 bytes hold 8 envelopes of 384 bytes, in each of 4 buffers
    sent, back = torch.arange(n), torch.arange(n).flip(0) + 7
    before = rows_of(world.device, sent)
    world.run(world.slots, sent, load=False)
    world.run(world.slots, back, load=True)
    assert torch.equal(rows_of(world.device, back), before)
    first, n_lent = LENT
    for buffer in world.lent:
        assert not buffer[:first].any() and not buffer[first + n_lent :].any()


def test_tokens_move_to_the_host_unchanged(world):
    fill(world.device)
    sent, to = torch.tensor([5, 9, 20]), torch.tensor([30, 2, 11])
    world.run(world.slots[10:13], sent, load=False)
    move = MoveToHost(world.pools, world.host)
    transfer = L2Transfer(move, None, to, world.slots[10:13])
    L2TransferEngine("direct").submit_device_to_host([transfer])
    assert torch.equal(rows_of(world.host, to), rows_of(world.device, sent))


def test_tenants_never_read_or_overwrite_each_others_tokens(world):
    """Their sessions take turns in the same slots, in any order."""
    rng, slots = random.Random(3), PeerSlots()
    slots.add("lease", world.slots.numpy())
    held: list[tuple[torch.Tensor, torch.Tensor]] = []  # slots of a session, and its tokens
    lent_before = [buffer.clone() for buffer in world.lent]
    for n_turn in range(200):
        n = rng.randrange(1, 9)
        taken = slots.take(n)
        if taken is not None:
            own = torch.from_numpy(taken)
            for buffer in (*world.device.k_buffer, *world.device.v_buffer):
                buffer[:n] = float(n_turn)  # a tenant's own value
            world.run(own, torch.arange(n), load=False)
            held.append((own, rows_of(world.device, torch.arange(n))))
        for own, tokens in held:
            world.run(own, to := torch.arange(20, 20 + len(own)), load=True)
            assert torch.equal(rows_of(world.device, to), tokens)
        if taken is None or rng.random() < 0.4:
            own, _ = held.pop(rng.randrange(len(held)))
            overwrite_lent(world.pools, own)
            slots.free(own.numpy())
    first, n_lent = LENT
    for buffer, before in zip(world.lent, lent_before, strict=True):
        assert torch.equal(buffer[:first], before[:first])
        assert torch.equal(buffer[first + n_lent :], before[first + n_lent :])


def test_a_transfer_is_divided_by_the_slots_numbers(world):
    slots = torch.tensor([3, int(world.slots[0]), 7, int(world.slots[1])])
    on_host, lent = world.controller._l2_transfers(slots, torch.tensor([10, 11, 12, 13]))
    assert on_host[1].tolist() == [3, 7] and on_host[2].tolist() == [10, 12]
    assert lent.device_indices.tolist() == [11, 13]
    assert (lent.host_indices + world.base).tolist() == world.slots[:2].tolist()


def test_a_later_lender_has_slots_of_its_own(world):
    world.pools.remove(world.base)
    again = world.pools.add(PeerPool(torch.zeros(4096, dtype=torch.uint8), BORROWER, world.device))
    assert again == world.base + PEER_SLOTS
    with pytest.raises(KeyError):
        world.run(world.slots[:1], torch.tensor([0]), load=True)


def test_a_dead_lenders_pages_stay_readable_until_they_are_unmapped(world):
    fill(world.device)
    world.run(world.slots[:4], torch.arange(4), load=False)
    before = rows_of(world.device, torch.arange(4))
    world.lent = None  # the lender's own mapping ends, its file is closed
    world.run(world.slots[:4], torch.arange(20, 24), load=True)
    assert torch.equal(rows_of(world.device, torch.arange(20, 24)), before)


def test_a_mapping_ends_with_its_pool(world):
    n_before = n_memory_files()
    other = World()
    assert n_memory_files() > n_before
    other.pools.remove(other.base)
    other.lent = None
    assert n_memory_files() == n_before


def n_memory_files() -> int:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("sglang_live-kv" in os.readlink(fd) for fd in fds if os.path.islink(fd))
