"""Write the README's measured section from the documents in benchmark/results.

python -m benchmark.summary            rewrites README.md between its markers
"""

import json
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
_USUAL_MODEL = "demo-random"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def documents(results: Path, benchmark: str) -> list[dict]:
    """All documents of a benchmark, the newest first."""
    found = [json.loads(path.read_text()) for path in results.glob(f"{benchmark}_*.json")]
    return sorted(found, key=lambda document: document["date"], reverse=True)


def newest(results: Path, benchmark: str) -> dict | None:
    """The latest document of a benchmark, by its own date."""
    return next(iter(documents(results, benchmark)), None)


def loads(results: Path) -> dict[str, list[tuple[dict, list[dict]]]]:
    """By kind of load: for each number of callers a document, and its points.

    The one with the most repeats, of those the newest.
    """
    kinds: dict[str, dict[int, tuple[dict, list[dict]]]] = {}
    found = documents(results, "voice_load")
    for document in sorted(found, key=lambda d: d["config"].get("repeats", 1), reverse=True):
        by_users = kinds.setdefault(_kind(document), {})
        for callers in {point["sessions"] for point in document["points"]} - by_users.keys():
            points = [p for p in document["points"] if p["sessions"] == callers]
            by_users[callers] = document, points
    return {kind: [kinds[kind][n] for n in sorted(kinds[kind])] for kind in sorted(kinds)}


def _kind(document: dict) -> str:
    what, model = _load(document["config"]), document["config"].get("model_path", _USUAL_MODEL)
    return what if model == _USUAL_MODEL else f"{what}, with the model `{model}`"


def _load(config: dict) -> str:
    if storm := config.get("storm"):
        what = "Storms: {sessions} messages of {clip_s:g} s every {period_s:g} s beside the callers"
        return what.format(**storm)
    if len(config["policies"]) > 2:
        return f"What brings what: interruptions with probability {config['barge_in']:g}"
    if config.get("barge_in"):
        return f"Interruptions with probability {config['barge_in']:g}"
    return "Conversations without interruptions"


def load_table(measured: list[tuple[dict, list[dict]]]) -> list[str]:
    """One line per point and arm."""
    lines = [
        "| callers | policies | TTFP after end of turn, P50 / P90 | without a gap over 100 ms "
        "| waste | stops within, P95 | turns/s | n | failed | callers late |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for document, points in measured:
        for point in points:
            own = point["ttfp_after_detection_ms"]
            cells = (
                str(point["sessions"]),
                f"`{point['policies']}`",
                f"{_one(own['p50'], '{:.0f}')} / {_one(own['p90'])}",
                _share(point["continuity"]),
                _share(point.get("waste")),
                _one(point.get("stop_latency_ms", {}).get("p95")),
                f"{turns_per_s(document, point):.2f}",
                str(own["n"]),
                str(point["failed"]),
                _share(point.get("late_frames")),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def turns_per_s(document: dict, point: dict) -> float:
    """Until the last answer was heard out, by the single turns: early answers end no turn."""
    arm = point["policies"], point["sessions"]
    runs = [r["turns"] for r in document["runs"] if (r["policies"], r["sessions"]) == arm]
    wall_s = sum(max(map(_heard_out_s, t)) - min(turn["start_s"] for turn in t) for t in runs)
    return sum(map(len, runs)) / wall_s


def _heard_out_s(turn: dict) -> float:
    if turn["cut_short"] or turn["ttfp_ms"] is None:
        return turn["end_s"]
    began_s = turn["start_s"] + turn["user_audio_s"] + turn["ttfp_ms"] / 1000
    return max(turn["end_s"], began_s + turn["audio_s"] + sum(turn["gaps_ms"]) / 1000)


def pressure_table(document: dict) -> list[str]:
    """More calls than the KV pool holds: one line per arm, over all repeats."""
    lines = [
        "| arm | time to first token, P50 / P90 / P99 | computed anew | loads that a prefill "
        "waited for | in all | came back unseen | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["arm"] == arm]
        waits_ms = [ms for row in rows for ms in row["ttft_all_ms"]]
        slowest = _one(float(np.percentile(waits_ms, 99)) if len(waits_ms) >= 100 else None)
        early, late = (sum(row[f"tokens_{how}"] for row in rows) for how in ("preloaded", "loaded"))
        cells = (
            f"`{arm}`",
            f"{np.percentile(waits_ms, 50):.0f} / {np.percentile(waits_ms, 90):.0f} / {slowest}",
            f"{sum(row['recomputed_tokens'] for row in rows):.0f} tokens",
            f"{sum(row['loads'] for row in rows):.0f}",
            _one(1000 * sum(row["reload_s"] for row in rows)),
            _share(early / (early + late) if early + late else None),
            str(len(waits_ms)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def kv_rows(results: Path) -> list[str]:
    rows = []
    if document := newest(results, "retention"):
        arms = {row["arm"]: row for row in document["rows"]}
        last = {arm: row["ages"][-1] for arm, row in arms.items()}
        held = {arm: f"{age['kv_tokens_per_call']:.0f}" for arm, age in last.items()}
        rows.append(
            _row(
                f"KV of a call after {last['bounded']['tokens_talked']} tokens, "
                f"window {document['config']['window']}, sink {document['config']['sink']}, "
                f"slack {document['config']['slack']}",
                f"{held['bounded']} tokens with a bound, {held['everything']} without; "
                f"a cut takes {arms['bounded']['cut_ms']:.2f} ms",
            )
        )
    if document := newest(results, "eviction"):
        picks = [row for row in document["rows"] if row["what"] == "index pick"]
        largest = max(picks, key=lambda row: (row["n_pages"], row["average_ms"]))
        what = f"choosing who gives KV back, of {largest['n_pages']} pages"
        rows.append(_row(what, f"{1000 * largest['average_ms']:.1f} us on average"))
    return rows


def frame_rows(results: Path) -> list[str]:
    """Calls in frame mode: what lasts, and how many are let in."""
    rows = []
    if document := newest(results, "collapse"):
        config = document["config"]
        what = (
            f"{config['sessions']} calls in frame mode, {config['seconds']:.0f} s, "
            f"a pool of {config['pool_tokens']} tokens ({document['device']})"
        )
        rows.append(_row(what, _collapses(document["rows"])))
    for document in documents(results, "endurance"):
        config, minutes = document["config"], document["by_minute"]
        kills = f", {config['kills'].replace(',', ' and ')} s killed" if config["kills"] else ""
        what = f"{config['sessions']} of them for {config['seconds'] / 60:.0f} min{kills}"
        first, last = minutes[1], minutes[-1]
        rows.append(
            _row(
                what,
                f"{document['without_result']} of {document['frames']} frames without result"
                + (" but while it was away" if kills else "")
                + f", {document['alive_at_the_end']} calls alive; second and last minute: P99 "
                f"{first['p99_ms']:.0f} and {last['p99_ms']:.0f} ms, memory "
                f"{first['memory_mib']:.0f} and {last['memory_mib']:.0f} MiB",
            )
        )
    for document in documents(results, "admission"):
        call_s = document["config"]["call_seconds"]
        length = f"of {call_s:.0f} s" if call_s else "without an end"
        what = f"more calls {length} come than can be served"
        told = [f"{document['n_star']} could, by brute force"]
        for found in document["open_systems"]:
            p90_ms = found["settled"]["latency_ms"]["p90"]
            lost = found["settled"]["empty_or_dropped"] / found["settled"]["frames"]
            most = max(sample["open"] for sample in found["trace"])
            bounded = "bounded" if found["arm"] == "window" else "without a bound"
            told.append(
                f"{bounded} at most {most} are let in, {found['open']:.0f} at the end, "
                f"P90 {p90_ms:.0f} ms, {100 * lost:.1f} % of frames lost"
            )
        text = "; ".join(told)
        rows.append(_row(what, text))
    return rows


def _collapses(runs: list[dict]) -> str:
    told = []
    for arm, name in (("off", "stock SGLang"), ("all", "bounded sessions")):
        some = [run for run in runs if run["arm"] == arm]
        told.append(f"{name}: {sum(run['collapsed'] for run in some)} of {len(some)} runs stall")
    pairs = [(run["predicted_s"], run["saturated_s"]) for run in runs]
    wrong = [abs(predicted / full - 1) for predicted, full in pairs if predicted and full]
    if wrong:
        told.append(f"when the pool is full is foretold within {_share(max(wrong))}")
    return ", ".join(told)


def demo_rows(document: dict) -> list[str]:
    """What the demo model can do, by `python -m training.demo.exam`."""
    spoken, asked, people = (
        document[name] for name in ("understood", "questions_as_items", "people")
    )
    return [
        _row(
            "demo model: spoken answers that a recogniser tells among "
            f"{spoken['ways']} sentences; its questions in voices that training never had",
            f"{_share(spoken['right'] / spoken['n'])}; {_share(asked['right'] / asked['n'])}, "
            f"answered wrong {_share(asked['confidently_wrong'] / asked['n'])}; people who talk of "
            "other things, music, animals: not understood "
            f"{people['not_understood']} of {people['n']}",
        )
    ]


def gateway_row(document: dict) -> str:
    """Of the document's first pair."""
    arms = {arm["arm"]: arm for arm in reversed(document["arms"])}
    ours, echo = arms["gateway"], arms["echo"]
    options, lag_ms, rss_mb = document["options"], ours["lag_ms"], ours["rss_mb"]
    what = (
        f"{options['sessions']} open microphones at the gateway, answered by a recording, for "
        f"{options['seconds'] / 60:.0f} min ({document['device']})"
    )
    text = (
        f"{ours['cpu_ms_per_s']:.1f} ms of CPU per second of one session, bare echo server "
        f"{echo['cpu_ms_per_s']:.1f} ms; loop lag P50 / P99 {lag_ms[0]:.1f} / {lag_ms[1]:.1f} ms; "
        f"memory {rss_mb[0]:.0f} MB at first, {rss_mb[len(rss_mb) // 2]:.0f} MB half way, "
        f"{rss_mb[-1]:.0f} MB in the end"
    )
    return _row(what, text)


def server_rows(document: dict) -> list[str]:
    starts = [run["server_start_s"] for run in document["runs"]]
    rss = max(point["peak_rss_mib"] for point in document["points"])
    return [
        _row("server start to ready", f"{min(starts):.0f} to {max(starts):.0f} s"),
        _row("memory of all processes, shared pages in each", f"{rss:.0f} MiB"),
    ]


def section(results: Path) -> str:
    parts: list[str] = []
    rows: list[str] = []
    for kind, measured in loads(results).items():
        devices = dict.fromkeys(document["device"] for document, _ in measured)
        commits = dict.fromkeys(document["git_commit"][:9] for document, _ in measured)
        where = f"{', '.join(devices)}, commit {', '.join(commits)}"
        parts += [f"{kind} ({where}):", "", *load_table(measured), ""]
    if pressure := newest(results, "kv_pressure"):
        calls = pressure["config"]["sessions"]
        where = f"{pressure['device']}, commit {pressure['git_commit'][:9]}"
        link = _link(pressure["config"]["link"])
        what = f"More calls than the KV pool holds: {calls}, {link}"
        parts += [f"{what} ({where}):", "", *pressure_table(pressure), ""]
    rows += kv_rows(results) + frame_rows(results)
    if exam := newest(results, "demo_exam"):
        rows += demo_rows(exam)
    if load := newest(results, "voice_load"):
        rows += server_rows(load)
    if turn := newest(results, "turn_cost"):
        share = f"{100 * turn['overhead_of_all']:.1f} % of a turn"
        what = f"time in which no model of any stage computes ({turn['device']})"
        rows.append(_row(what, share))
    if story := newest(results, "rtf"):
        config = story["config"]
        what = (
            f"RTF of the model `{config['model_path']}` on {config['cores']} core"
            f"{'s' * (config['cores'] > 1)}, its client included ({story['device']})"
        )
        rows.append(_row(what, f"{story['rtf_median']:.2f}"))
    if gateway := newest(results, "gateway_cost"):
        rows.append(gateway_row(gateway))
    if not parts and not rows:
        return "Nothing has been measured yet."
    note = (
        "Callers run on the same cores as the server. `all` are the policies that there were at "
        "that commit, but for `admission`. *Callers late*: share of their microphones' frames that "
        "were sent more than 50 ms late; above 1 % callers and server together have too little "
        "CPU, and the times are also the load generator's. Documents and every single turn: "
        "[benchmark/results](benchmark/results/README.md)."
    )
    return "\n".join([*parts, "| what | measured |", "|---|---|", *rows, "", note])


def _link(text: str) -> str:
    if not text:
        return "tiers of one memory"
    gb_per_s, latency_us = text.split(":")
    return f"a modelled link to host memory of {gb_per_s} GB/s and {latency_us} us"


def _row(what: str, value: str) -> str:
    return f"| {what} | {value} |"


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
