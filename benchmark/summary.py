"""Write the README's measured section from the documents in benchmark/results.

python -m benchmark.summary            rewrites README.md between its markers
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def newest(results: Path, benchmark: str) -> dict | None:
    """The latest document of a benchmark, by its own date."""
    found = [json.loads(path.read_text()) for path in results.glob(f"{benchmark}_*.json")]
    return max(found, key=lambda document: document["date"], default=None)


def load_rows(document: dict) -> list[str]:
    rows = []
    for point in document["points"]:
        n, ttfp, own = point["sessions"], point["ttfp_ms"], point["ttfp_after_detection_ms"]
        callers = "1 caller" if n == 1 else f"{n} callers"
        rows += [
            _row(f"TTFP, {callers}, policies {point['policies']}", _percentiles(ttfp)),
            _row("of it after the end of the turn was detected", _percentiles(own)),
            _row(f"turns without a gap over 100 ms, {callers}", _share(point["continuity"])),
            _row(f"RTF, {callers}", _one(point["rtf"]["p50"], "{:.2f}")),
            *interruption_rows(point, callers),
        ]
    starts = [run["server_start_s"] for run in document["runs"]]
    rows.append(_row("server start to ready", f"{min(starts):.0f} to {max(starts):.0f} s"))
    rss = max(point["peak_rss_mib"] for point in document["points"])
    rows.append(_row("memory of all processes, shared pages in each", f"{rss:.0f} MiB"))
    return rows


def interruption_rows(point: dict, callers: str) -> list[str]:
    """Of loads in which callers interrupted; documents from before that have none of it."""
    if not point.get("barge_ins"):
        return []
    stop, n = point["stop_latency_ms"], point["barge_ins"]
    latency = f"P50 {_one(stop['p50'])}, P95 {_one(stop['p95'])}, n {stop['n']}"
    rows = [_row(f"stop latency after a barge-in, {callers}", latency)]
    if point.get("waste") is not None:
        rows.append(_row(f"waste at {n} barge-ins, {callers}", _share(point["waste"])))
    return rows


def section(results: Path) -> str:
    rows: list[str] = []
    device = commit = ""
    if load := newest(results, "voice_load"):
        rows += load_rows(load)
        device, commit = load["device"], load["git_commit"][:9]
    if turn := newest(results, "turn_cost"):
        share = f"{100 * turn['overhead_of_all']:.1f} % of a turn"
        rows.append(_row("time in which no model of any stage computes", share))
    if gateway := newest(results, "gateway_cost"):
        costs = {arm["arm"]: arm["cpu_ms_per_s"] for arm in gateway["arms"]}
        text = f"{costs['gateway']:.0f} ms, bare echo server {costs['echo']:.0f} ms"
        rows.append(_row("gateway CPU per second of one session", text))
    if not rows:
        return "Nothing has been measured yet."
    head = ["| what | measured |", "|---|---|"]
    note = (
        f"Device: {device}; commit {commit}; callers run on the same cores as the server. "
        "Documents and every single turn: [benchmark/results](benchmark/results/README.md)."
    )
    return "\n".join([*head, *rows, "", note])


def _row(what: str, value: str) -> str:
    return f"| {what} | {value} |"


def _percentiles(values: dict) -> str:
    parts = (f"P50 {_one(values['p50'])}", f"P90 {_one(values['p90'])}", f"n {values['n']}")
    return ", ".join(parts)


def _share(value: float | None) -> str:
    return _one(None if value is None else 100 * value, "{:.1f} %")


def _one(value: float | None, form: str = "{:.0f} ms") -> str:
    return "n/a" if value is None else form.format(value)


def main() -> None:
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    body = section(ROOT / "benchmark" / "results")
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")


if __name__ == "__main__":
    main()
