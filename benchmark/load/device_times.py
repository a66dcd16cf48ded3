"""What a modelled device says of its work, from the server's /metrics, and whether it held.

A result that the host noticed after its modelled time is late: the machine computed or scheduled
slower than the device it models, and the times of the run are partly its own.
"""

from collections import defaultdict

from benchmark.load.stage_load import stage_loads

_PREFIX = "device_"

DeviceTimes = dict[str, dict[str, float]]


def device_times(metrics: str) -> DeviceTimes:
    """Counters by stage, summed over its replicas; empty if the device is not modelled."""
    found = {
        stage: {
            name.removeprefix(_PREFIX): value
            for name, value in load.items()
            if name.startswith(_PREFIX)
        }
        for stage, load in stage_loads(metrics).items()
    }
    return {stage: counters for stage, counters in found.items() if counters}


def grown(before: DeviceTimes, after: DeviceTimes) -> DeviceTimes:
    return {
        stage: {
            name: round(value - before.get(stage, {}).get(name, 0.0), 4)
            for name, value in counters.items()
        }
        for stage, counters in after.items()
    }


def device_table(times: list[DeviceTimes]) -> str | None:
    """Sums over runs; None if the device was not modelled."""
    rows = []
    for stage in sorted({stage for run in times for stage in run}):
        total: dict[str, float] = defaultdict(float)
        for run in times:
            for name, value in run.get(stage, {}).items():
                total[name] += value
        busy_s = max(total["modelled_s"], 1e-9)
        rows.append(
            f"{stage:8}  {total['batches']:7.0f} batches of {total['modelled_s']:7.1f} s in all, "
            f"{total['queued_s']:6.1f} s queued; late {total['late_batches']:6.0f} by "
            f"{total['late_s']:6.1f} s in all, {100 * total['late_s'] / busy_s:5.1f} %"
        )
    return "\n".join(["Modelled device", *rows]) if rows else None
