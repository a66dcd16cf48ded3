"""CPU time and memory of the server's processes, by name, while a load runs."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_S = 1.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """All processes of one name together.

    Attributes:
        cpu_s: user and system time spent between the first and the last sample.
        peak_rss_mib: sum of the processes' own peaks; shared pages count in each.
    """

    n_processes: int
    cpu_s: float
    peak_rss_mib: float


@dataclass(slots=True)
class _Seen:
    label: str
    cpu_before_s: float
    cpu_now_s: float
    peak_rss_bytes: int


def label(name: str, cmdline: list[str]) -> str:
    """What to call a process: the title SGLang gave it, or the module it runs."""
    joined = " ".join(cmdline)
    if "multiprocessing.resource_tracker" in joined:
        return "resource_tracker"
    if joined.startswith("sglang"):
        return joined.split()[0]
    if "-m" in cmdline[:-1]:
        return cmdline[cmdline.index("-m") + 1]
    if "multiprocessing.spawn" in joined:
        return "multiprocessing child"
    return Path(cmdline[0]).name if cmdline else name


class UsageMeter:
    """Samples a process tree. CPU time spent before the first sample does not count."""

    def __init__(self, pid: int):
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], _Seen] = {}
        self._started = False

    def sample(self) -> None:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                with process.oneshot():
                    self._add(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                continue
        self._started = True

    async def keep_sampling(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def usage(self) -> dict[str, ProcessUsage]:
        by_label: dict[str, list[_Seen]] = {}
        for seen in self._seen.values():
            by_label.setdefault(seen.label, []).append(seen)
        return {
            name: ProcessUsage(
                n_processes=len(group),
                cpu_s=round(sum(s.cpu_now_s - s.cpu_before_s for s in group), 3),
                peak_rss_mib=round(sum(s.peak_rss_bytes for s in group) / MIB, 1),
            )
            for name, group in sorted(by_label.items())
        }

    def _add(self, process: psutil.Process) -> None:
        times = process.cpu_times()
        cpu_s = times.user + times.system
        rss_bytes = process.memory_info().rss
        # A pid may be used again; with the start time it is one process.
        key = (process.pid, process.create_time())
        seen = self._seen.get(key)
        if seen is None:
            name = label(process.name(), process.cmdline())
            before_s = 0.0 if self._started else cpu_s
            self._seen[key] = _Seen(name, before_s, cpu_s, rss_bytes)
            return
        seen.cpu_now_s = cpu_s
        seen.peak_rss_bytes = max(seen.peak_rss_bytes, rss_bytes)
