"""Claims about copies between devices, as a program: the fake device is one of a whole process."""

from types import SimpleNamespace

import torch

from sglang_live.bridge.platform import kv_copy
from sglang_live.kernels.kv_rows import kernel

N_LAYERS, N_SLOTS = 3, 40


def pool(device: str) -> SimpleNamespace:
    """Keys of 2 heads of 8 elements, and values of 2 heads of 4, per layer."""
    k, v = ([torch.randn(N_SLOTS, 2, dim).to(device) for _ in range(N_LAYERS)] for dim in (8, 4))
    return SimpleNamespace(k=k, v=v, all=[*k, *v])


def slots(page: int) -> torch.Tensor:
    pages = torch.randperm(N_SLOTS // page)[: N_SLOTS // page // 2]
    return (pages[:, None] * page + torch.arange(page)).flatten()


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.cpu().clone() for x in tensors]


def save_and_load(page: int) -> None:
    """As SGLang: all layers at once to the host, one by one back, on a stream for each."""
    device, host, loaded = pool("cuda"), pool("cpu"), pool("cuda")
    on_device, on_host, back = slots(page), slots(page), slots(page)
    kept = bits(host.all), bits(loaded.all)
    with torch.cuda.stream(torch.cuda.Stream()):
        kv_copy.copy_rows(device.all, host.all, on_device, on_host, page)
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(N_LAYERS):
            src, dst = [host.k[i], host.v[i]], [loaded.k[i], loaded.v[i]]
            kv_copy.copy_rows(src, dst, on_host, back, page)
    for source, a, b, *old in zip(device.all, host.all, loaded.all, *kept, strict=True):
        values = source.cpu()[on_device]
        for new, was, rows in ((a, old[0], on_host), (b.cpu(), old[1], back)):
            was[rows] = values
            assert torch.equal(new, was)


def main() -> None:
    launches, uploads = [], []
    launch, copy_to = kernel._launch, kv_copy.copy_to
    kernel._launch = lambda *args: launches.append(args) or launch(*args)
    kv_copy.copy_to = lambda *args: uploads.append(args) or copy_to(*args)
    for n, page in enumerate((1, 4), start=1):
        save_and_load(page)
        assert len(launches) == n * (1 + N_LAYERS)
        assert len(uploads) == 2 * n, "the slots of a load are copied once"
    device, host, none = pool("cuda"), pool("cpu"), torch.zeros(0, dtype=torch.int64)
    kv_copy.copy_rows(device.all, host.all, none, none, 1)
    assert len(launches) == 2 * (1 + N_LAYERS)
    slots_changed_in_place(device, host)
    print("copied")


def slots_changed_in_place(device: SimpleNamespace, host: SimpleNamespace) -> None:
    from_, to = torch.tensor([1, 2]), torch.tensor([3, 4])
    for first in (0, 7):
        from_[0] = first
        kv_copy.copy_rows(device.all, host.all, from_, to, 1)
        assert torch.equal(host.k[0][to], device.k[0].cpu()[from_])


if __name__ == "__main__":
    main()
