"""Tables of the results; a table is None if the load has no such measurement."""

from benchmark.load.point import RunResult
from sglang_live.extensions.planner.simulation.load.stats import Distribution, PointStats

UNKNOWN = "n/a"
Row = tuple[str, ...]


def table(points: list[PointStats]) -> str:
    header = (
        "turns ok",
        "failed",
        "TTFP ms 50/90/95",
        "n",
        "end of turn 50",
        "TTFP after it 50/90/95",
        "RTF 50/90",
        "continuous",
        "turns/s",
        "useful/s",
        "waste",
        "SLO",
        "CPU s/audio s",
        "RSS MiB",
    )
    rows = [
        (
            str(point.completed),
            str(point.failed),
            _percentiles(point.ttfp_ms),
            str(point.ttfp_ms.n),
            number(point.end_of_turn_ms.p50),
            _percentiles(point.ttfp_after_detection_ms),
            f"{number(point.rtf.p50, 2)}/{number(point.rtf.p90, 2)}",
            percent(point.continuity),
            f"{point.turns_per_s:.3f}",
            f"{point.useful_turns_per_s:.3f}",
            percent(point.waste),
            {None: UNKNOWN, True: "met", False: "missed"}[point.within_slo],
            number(point.cpu_s_per_audio_s, 2),
            number(point.peak_rss_mib),
        )
        for point in points
    ]
    return by_point(header, points, rows)


def interruption_table(points: list[PointStats]) -> str | None:
    """Barge-ins and false triggers."""
    points = [p for p in points if p.barge_ins_planned or p.false_triggers or p.wrong_interruptions]
    header = (
        "barge-ins",
        "planned",
        "stop ms 50/95",
        "n",
        "silent after ms 50/95",
        "continuous until then",
        "false triggers",
        "wrong interruptions",
        "heard s",
        "generated s",
        "waste",
        "refused acks",
    )
    rows = [
        (
            str(point.barge_ins),
            str(point.barge_ins_planned),
            f"{number(point.stop_latency_ms.p50)}/{number(point.stop_latency_ms.p95)}",
            str(point.stop_latency_ms.n),
            f"{number(point.silence_ms.p50)}/{number(point.silence_ms.p95)}",
            percent(point.barged_continuity),
            str(point.false_triggers),
            str(point.wrong_interruptions),
            f"{point.heard_s:.0f}",
            number(point.generated_s),
            percent(point.waste),
            str(point.side_errors),
        )
        for point in points
    ]
    return by_point(header, points, rows) if points else None


def open_loop_table(points: list[PointStats]) -> str | None:
    """Workload W1: VoxServe's measures."""
    points = [point for point in points if point.rate_rps is not None]
    header = ("arrivals/s", "TTFA ms 90/99", "n", "viability", "refused", "failed")
    rows = [
        (
            f"{point.rate_rps:g}",
            f"{number(point.ttfp_ms.p90)}/{number(point.ttfp_ms.p99)}",
            str(point.ttfp_ms.n),
            percent(point.viability, 2),
            str(point.refused),
            str(point.failed),
        )
        for point in points
    ]
    return by_point(header, points, rows) if points else None


def storm_table(points: list[PointStats]) -> str | None:
    points = [point for point in points if point.storm is not None]
    header = ("storm messages", "failed", "first word ms 50/90", "n")
    rows = [
        (
            str(point.storm.sent),
            str(point.storm.failed),
            f"{number(point.storm.ttft_ms.p50)}/{number(point.storm.ttft_ms.p90)}",
            str(point.storm.ttft_ms.n),
        )
        for point in points
    ]
    return by_point(header, points, rows) if points else None


def ratio_table(points: list[PointStats]) -> str | None:
    """Ratio of every arm to `off` at the same point; for times, below 1 is faster."""
    places = {(p.sessions, p.rate_rps): p for p in points if p.policies == "off"}
    pairs = [
        (point, off)
        for point in points
        if point.policies != "off" and (off := places.get((point.sessions, point.rate_rps)))
    ]
    header = (
        "TTFP 50/90/95",
        "TTFP after end of turn 50/90/95",
        "turns/s",
        "useful/s",
        "stop 95",
        "waste",
        "CPU s/audio s",
        "continuous, off to arm",
    )
    rows = [
        (
            _ratios(point.ttfp_ms, off.ttfp_ms),
            _ratios(point.ttfp_after_detection_ms, off.ttfp_after_detection_ms),
            _ratio(point.turns_per_s, off.turns_per_s),
            _ratio(point.useful_turns_per_s, off.useful_turns_per_s),
            _ratio(point.stop_latency_ms.p95, off.stop_latency_ms.p95),
            _ratio(point.waste, off.waste),
            _ratio(point.cpu_s_per_audio_s, off.cpu_s_per_audio_s),
            f"{percent(off.continuity)} to {percent(point.continuity)}",
        )
        for point, off in pairs
    ]
    return by_point(header, [p for p, _ in pairs], rows, against="/off") if pairs else None


def process_table(results: list[RunResult]) -> str:
    """CPU and memory by process name, of every run."""
    rows = [("arm", "sessions", "repeat", "process", "count", "CPU s", "peak RSS MiB")]
    for result in results:
        run = result.run
        for name, usage in result.usage.items():
            numbers = (str(usage.n_processes), f"{usage.cpu_s:.1f}", f"{usage.peak_rss_mib:.0f}")
            rows.append((run.policies, str(run.sessions), str(run.repeat), name, *numbers))
    return aligned(rows)


def number(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f} %"


def by_point(header: Row, points: list[PointStats], rows: list[Row], against: str = "") -> str:
    places = [(point.policies + against, str(point.sessions)) for point in points]
    body = [(*place, *row) for place, row in zip(places, rows, strict=True)]
    return aligned([("arm", "sessions", *header), *body])


def _percentiles(distribution: Distribution) -> str:
    return "/".join(number(p) for p in (distribution.p50, distribution.p90, distribution.p95))


def _ratios(one: Distribution, other: Distribution) -> str:
    pairs = ((one.p50, other.p50), (one.p90, other.p90), (one.p95, other.p95))
    return "/".join(_ratio(a, b) for a, b in pairs)


def _ratio(one: float | None, other: float | None) -> str:
    return UNKNOWN if one is None or not other else f"{one / other:.2f}"


def aligned(rows: list[Row]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
