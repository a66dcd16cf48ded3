"""Write the result tables of docs/ and benchmark/notes/ from the documents in benchmark/results.

    python -m benchmark.summary

Only the text between a pair of markers changes; the first one names the tables.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmark.call_tables import call_table, outside_lines, word_table
from benchmark.failover.report import loss_lines
from benchmark.hybrid import report as hybrid
from benchmark.load.kept import conditions, load_table, loads, one, share, source
from benchmark.modelled_turn import table as turn_table
from benchmark.speaking_table import speaking_rates, speaking_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmark" / "results"
PAGES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmark" / "notes").glob("*.md")]
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"
_REGION = re.compile(r"<!-- measured:begin (\w+) -->\n.*?<!-- measured:end -->", re.DOTALL)


def documents(results: Path, benchmark: str) -> list[dict]:
    """All documents of a benchmark, newest first."""
    found = [json.loads(path.read_text("utf-8")) for path in results.glob(f"{benchmark}/*.json")]
    return sorted(found, key=lambda document: document["date"], reverse=True)


def newest(results: Path, benchmark: str) -> dict | None:
    """The newest document of a benchmark by its date, or None if there is none."""
    return next(iter(documents(results, benchmark)), None)


def pressures(results: Path) -> dict[float | None, dict]:
    """By the pool's share of the most KV that all sessions hold at one time: newest document."""
    found: dict[float | None, dict] = {}
    for document in documents(results, "kv_pressure"):
        found.setdefault(document["config"].get("pool_share"), document)
    return dict(sorted(found.items(), key=lambda item: item[0] or 0.0))


def pressure_table(document: dict) -> list[str]:
    """More sessions than the KV pool holds: one line per arm, over all repeats."""
    lines = [
        "| arm | time to first token, P50 / P90 / P99 | recomputed | loads that a prefill "
        "waited for | their time | share preloaded | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["arm"] == arm]
        waits_ms = [ms for row in rows for ms in row["ttft_all_ms"]]
        # P99 of fewer than a hundred turns would be their maximum.
        quantiles = (50, 90, 99) if len(waits_ms) >= 100 else (50, 90)
        waited = " / ".join(f"{np.percentile(waits_ms, q):.0f}" for q in quantiles)
        early, late = (sum(row[f"tokens_{how}"] for row in rows) for how in ("preloaded", "loaded"))
        cells = (
            f"`{arm}`",
            f"{waited} ms",
            f"{sum(row['recomputed_tokens'] for row in rows):.0f} tokens",
            f"{sum(row['loads'] for row in rows):.0f}",
            one(1000 * sum(row["reload_s"] for row in rows)),
            share(early / (early + late) if early + late else None),
            str(len(waits_ms)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def replayed_lines(document: dict) -> list[str]:
    """The same schedules without an engine: misses of each policy. Empty in older documents."""
    found: dict[str, list[dict]] = {}
    for row in document.get("replayed", ()):
        found.setdefault(row["policy"], []).append(row)
    if not found:
        return []
    misses = {name: sum(r["demand"]["misses"] for r in rows) for name, rows in found.items()}
    reuses = sum(row["demand"]["reuses"] for row in found["informed"])
    hidden, early = (
        sum(row["preload"][f"{what}_tokens"] for row in found["next-use"])
        for what in ("hidden", "reloaded")
    )
    names = ", ".join(f"`{name}` {n}" for name, n in misses.items())
    return [
        "",
        f"The same schedules replayed without an engine (benchmark.kv.judge): of {reuses} requests "
        f"after a session's first, the number that found KV evicted: {names}. `next-use` has "
        f"{misses['next-use'] / misses['informed']:.2f} times the misses of `informed`. With "
        f"preload at the begin of speech `next-use` hides {share(hidden / early)} of the reloads, "
        "over a link that takes no time. `informed` knows as much as a server can: who speaks, how "
        "far playback is, and how much text is complete; `belady`, the optimum, also when each "
        "user will speak, for how long, and which response is the last.",
    ]


def kv_rows(results: Path) -> list[str]:
    rows = []
    if document := newest(results, "retention"):
        arms = {row["arm"]: row for row in document["rows"]}
        last = {arm: row["ages"][-1] for arm, row in arms.items()}
        held = {arm: f"{age['kv_tokens_per_call']:.0f}" for arm, age in last.items()}
        rows.append(
            _row(
                document,
                f"KV of a session after {last['bounded']['tokens_talked']} tokens, "
                f"model `{document['config'].get('model_path', 'demo-random')}`, "
                f"window {document['config']['window']}, sink {document['config']['sink']}, "
                f"slack {document['config']['slack']}",
                f"{held['bounded']} tokens with `retention`, {held['everything']} without; "
                f"a compaction takes {arms['bounded']['cut_ms']:.2f} ms",
            )
        )
    if document := newest(results, "eviction"):
        picks = [row for row in document["rows"] if row["what"] == "index pick"]
        largest = max(picks, key=lambda row: (row["n_pages"], row["average_ms"]))
        what = f"choice of the next KV to evict, of {largest['n_pages']} pages"
        rows.append(_row(document, what, f"{1000 * largest['average_ms']:.1f} us on average"))
    return rows


def frame_rows(results: Path) -> list[str]:
    """Sessions in frame mode: whether they last, and how many are admitted."""
    rows = []
    if document := newest(results, "collapse"):
        config = document["config"]
        what = (
            f"{config['sessions']} sessions in frame mode, {config['seconds']:.0f} s, "
            f"a pool of {config['pool_tokens']} tokens"
        )
        rows.append(_row(document, what, _collapses(document["rows"])))
    for document in documents(results, "endurance"):
        config, minutes = document["config"], document["by_minute"]
        kills = f", {config['kills'].replace(',', ' and ')} s killed" if config["kills"] else ""
        minutes_long = f"{config['seconds'] / 60:.0f} min"
        what = f"{config['sessions']} sessions in frame mode, {minutes_long}{kills}"
        first, last = minutes[1], minutes[-1]
        rows.append(
            _row(
                document,
                what,
                f"{document['without_result']} of {document['frames']} frames without result"
                + (" outside the time in which it was down" if kills else "")
                + f", {document['alive_at_the_end']} sessions alive; second and last minute: P99 "
                f"{first['p99_ms']:.0f} and {last['p99_ms']:.0f} ms, memory "
                f"{first['memory_mib']:.0f} and {last['memory_mib']:.0f} MiB",
            )
        )
    for document in documents(results, "admission"):
        length_s = document["config"]["call_seconds"]
        length = f"of {length_s:.0f} s" if length_s else "without an end"
        what = f"more sessions {length} arrive than the server can serve"
        parts = [f"{document['n_star']} can be served, by brute force"]
        for found in document["open_systems"]:
            p90_ms = found["settled"]["latency_ms"]["p90"]
            lost = found["settled"]["empty_or_dropped"] / found["settled"]["frames"]
            most = max(sample["open"] for sample in found["trace"])
            bounded = "with `retention`" if found["arm"] == "window" else "without it"
            parts.append(
                f"{bounded} at most {most} are admitted, {found['open']:.0f} at the end, "
                f"P90 {p90_ms:.0f} ms, {100 * lost:.1f} % of frames lost"
            )
        rows.append(_row(document, what, "; ".join(parts)))
    return rows


def _collapses(runs: list[dict]) -> str:
    parts = []
    for arm, name in (("off", "stock SGLang"), ("all", "bounded sessions")):
        some = [run for run in runs if run["arm"] == arm]
        parts.append(f"{name}: {sum(run['collapsed'] for run in some)} of {len(some)} runs stall")
    pairs = [(run["predicted_s"], run["saturated_s"]) for run in runs]
    wrong = [abs(predicted / full - 1) for predicted, full in pairs if predicted and full]
    if wrong:
        parts.append(f"the time until the pool is full is predicted to within {share(max(wrong))}")
    return ", ".join(parts)


def demo_rows(document: dict) -> list[str]:
    """Abilities of the demo model, measured by `python -m training.demo.exam`."""
    spoken, asked, people = (
        document[name] for name in ("understood", "questions_as_items", "people")
    )
    return [
        _row(
            document,
            "demo model: spoken responses that a recogniser identifies among "
            f"{spoken['ways']} sentences; its questions, in voices that training did not use",
            f"{share(spoken['right'] / spoken['n'])}; {share(asked['right'] / asked['n'])} "
            f"right, {share(asked['confidently_wrong'] / asked['n'])} wrong; people who talk "
            "of other things, music, animals: "
            f"{people['not_understood']} of {people['n']} not understood",
        )
    ]


def gateway_row(document: dict) -> str:
    """Cost of the gateway beside an echo server, of the document's first pair of runs."""
    arms = {arm["arm"]: arm for arm in reversed(document["arms"])}
    ours, echo = arms["gateway"], arms["echo"]
    options, lag_ms, rss_mb = document["options"], ours["lag_ms"], ours["rss_mb"]
    what = (
        f"{options['sessions']} open microphones at the gateway, responses from a recording, "
        f"{options['seconds'] / 60:.0f} min"
    )
    text = (
        f"{ours['cpu_ms_per_s']:.1f} ms of CPU per second of one session, bare echo server "
        f"{echo['cpu_ms_per_s']:.1f} ms; loop lag P50 / P99 {lag_ms[0]:.1f} / {lag_ms[1]:.1f} ms; "
        f"memory {rss_mb[0]:.0f} MB at the start, {rss_mb[len(rss_mb) // 2]:.0f} MB at half time, "
        f"{rss_mb[-1]:.0f} MB at the end"
    )
    return _row(document, what, text)


def engine_rows(document: dict) -> list[str]:
    """Policies inside a running engine, and on a modelled device all Python of its scheduler."""
    rows = []
    for row in document["rows"]:
        what = f"decisions of the policies per round, {row['n_streams']:.0f} streams in a thinker"
        text = (
            f"{row['decide_ms_per_round']:.3f} ms, {100 * row['share_of_rounds']:.2f} % of a round "
            f"of {row['round_ms']:.1f} ms"
        )
        if (python := row.get("python_share_of_rounds")) is not None:
            text += (
                f"; all Python of its scheduler {share(python)}; results late by "
                f"{share(row['late_share_of_rounds'])}"
            )
        rows.append(_row(document, what, text))
    return rows


def server_rows(document: dict) -> list[str]:
    model = document["config"].get("model_path", "demo-random")
    starts = [run["server_start_s"] for run in document["runs"]]
    rss = max(point["peak_rss_mib"] for point in document["points"])
    return [
        _row(
            document,
            f"start of the server until it serves, model `{model}`",
            f"{min(starts):.0f} to {max(starts):.0f} s",
        ),
        _row(
            document,
            f"memory of all processes; shared pages count in each; model `{model}`",
            f"{rss:.0f} MiB",
        ),
    ]


def section(results: Path) -> str:
    """All tables."""
    texts = [table(results) for table in TABLES.values()]
    return "\n\n".join(text for text in texts if text) or "Nothing has been measured yet."


def load_tables(results: Path) -> str:
    """One table per kind of load."""
    parts: list[str] = []
    for kind, measured in loads(documents(results, "voice_load")).items():
        parts += [f"### {kind}", "", conditions(measured), "", *load_table(measured), ""]
    return "\n".join(parts).rstrip()


def baseline_tables(results: Path) -> str:
    """`all` beside the best baseline, simulated, one table per GPU; of the newest documents, which
    may be one for each share of interruptions."""
    newest_of: dict[str, list[dict]] = {}
    for document in documents(results, "simulate"):
        if document["benchmark"] != "simulate" or not _is_plain(document["config"]):
            continue
        if any(map(_has_gains, document.get("loads", ()))):
            kept = newest_of.setdefault(document["device"], [])
            if all(document["git_commit"] == one["git_commit"] for one in kept):
                kept.append(document)
    parts: list[str] = []
    for device, kept in sorted(newest_of.items()):
        document, loads = kept[0], [load for one in kept for load in one["loads"]]
        loads.sort(key=lambda load: load["barge_in"])
        seeds = " or ".join(sorted({str(one["config"]["repeats"]) for one in kept}))
        parts += [
            f"### {device[0].upper()}{device[1:]}",
            "",
            f"{seeds} seeds, commit{source(document).rpartition('commit')[2]}.",
            "",
            "| interruptions | users | best baseline: P90 | `all`: P90 | times sooner | from the "
            "end of speech, P90 | continuous | waste | useful turns |",
            "|---|---|---|---|---|---|---|---|---|",
            *_baseline_rows(loads),
            "",
        ]
        for load in loads:
            if "capacity" not in load:
                continue
            within = ", ".join(f"`{arm}` {c['users']}" for arm, c in load["capacity"].items())
            parts += [f"Users within the SLO, interruptions {load['barge_in']:g}: {within}.", ""]
    return "\n".join(parts).rstrip()


def _is_plain(config: dict) -> bool:
    """The load of docs/benchmarks.md: others are in the notes."""
    own = {"turns": 6, "sharing": "queue", "pauses_s": 0.0, "reply_scale": 1.0, "arrive_s": 0.0}
    return all(config.get(name, value) == value for name, value in own.items())


def _has_gains(load: dict) -> bool:
    return bool(load.get("beside_best_baseline"))


def _baseline_rows(loads: list[dict]) -> list[str]:
    """A row for each load; where two documents have it, of the newer one."""
    rows: dict[tuple[float, int], str] = {}
    for load in loads:
        points = {(point["policies"], point["sessions"]): point for point in load["points"]}
        for gain in load["beside_best_baseline"]:
            if gain["policies"] == "all":
                key = load["barge_in"], gain["sessions"]
                rows.setdefault(key, _baseline_row(load["barge_in"], gain, points))
    return [row for _, row in sorted(rows.items())]


def _baseline_row(barge_in: float, gain: dict, points: dict) -> str:
    n = gain["sessions"]
    base, own = points[gain["baseline"], n], points["all", n]
    mean, least, most = gain["earlier"]
    cells = (
        f"{barge_in:g}",
        str(n),
        f"`{gain['baseline']}` {gain['p90_from_ms']:.0f} ms",
        f"{gain['p90_ms']:.0f} ms",
        f"{mean:.2f} ({least:.2f} to {most:.2f})",
        f"{base['ttfp_ms']['p90']:.0f} → {own['ttfp_ms']['p90']:.0f} ms",
        f"{share(base['continuity'])} → {share(own['continuity'])}",
        f"{share(base['waste'])} → {share(own['waste'])}",
        f"{gain['useful'][0]:.2f} times",
    )
    return f"| {' | '.join(cells)} |"


def kv_tables(results: Path) -> str:
    """More sessions than the KV pool holds, one table per size of the pool."""
    parts: list[str] = []
    for share_of_all, pressure in pressures(results).items():
        size = f": room for {100 * share_of_all:.0f} % of their KV" if share_of_all else ""
        parts += [
            f"### More sessions than the KV pool holds{size}",
            "",
            f"{pressure['config']['sessions']} sessions, {_link(pressure)}. {source(pressure)}.",
            "",
            *pressure_table(pressure),
            *replayed_lines(pressure),
            "",
        ]
    return "\n".join(parts).rstrip()


def modelled_turn_table(results: Path) -> str:
    """Spans of one turn beside what they cost by the device model."""
    turns = newest(results, "modelled_turn")
    if turns is None:
        return ""
    parts = [
        "### One spoken turn on a modelled device",
        "",
        f"Medians of {turns['config']['turns']} turns, policies off. {source(turns)}.",
        "",
        *turn_table(turns["rows"], turns["device_times"]),
    ]
    return "\n".join(parts)


def best_effort_tables(results: Path) -> str:
    """Best-effort work beside those who listen."""
    parts: list[str] = []
    for document in (*documents(results, "hybrid"), *documents(results, "simulated_hybrid")):
        parts += [
            f"### Best effort: {hybrid.title(document)}",
            "",
            f"{hybrid.conditions(document)} {source(document)}.",
            "",
            *hybrid.table(document),
            "",
        ]
    for document in documents(results, "hybrid_beside_batch"):
        config = document["config"]
        parts += [
            f"### Users beside a full batch queue, {config['users']} at once",
            "",
            f"{config['rounds']} blocks of {config['block_s']:.0f} s of each kind, in turn, on one "
            f"server. {source(document)}.",
            "",
            *hybrid.batch_table(document),
            "",
        ]
    return "\n".join(parts).rstrip()


def single_figures(results: Path) -> str:
    """One table of figures that need none of their own."""
    if not (rows := single_rows(results)):
        return ""
    return "\n".join(("| what | measured | where |", "|---|---|---|", *rows))


def single_rows(results: Path) -> list[str]:
    """One line per figure that needs no table of its own."""
    rows = kv_rows(results) + frame_rows(results)
    if exam := newest(results, "demo_exam"):
        rows += demo_rows(exam)
    found = documents(results, "voice_load")
    if load := next((document for document in found if "device_model" not in document), None):
        rows += server_rows(load)
    if turn := newest(results, "turn_cost"):
        share = f"{100 * turn['overhead_of_all']:.1f} % of a turn"
        rows.append(_row(turn, "time in which no stage's model computes", share))
    if story := newest(results, "rtf"):
        config = story["config"]
        what = (
            f"RTF of the model `{config['model_path']}` on {config['cores']} core"
            f"{'s' * (config['cores'] > 1)}, the client included"
        )
        rows.append(_row(story, what, f"{story['rtf_median']:.2f}"))
    if engine := newest(results, "policy_engine"):
        rows += engine_rows(engine)
    if gateway := newest(results, "gateway_cost"):
        rows.append(gateway_row(gateway))
    of_losses: dict[str, str] = {}  # one document may have some of the arms alone
    for lost in documents(results, "failover"):
        lines = {kind: _row(lost, *line) for kind, line in loss_lines(lost).items()}
        of_losses = lines | of_losses
    return [*rows, *of_losses.values()]


def call_tables(results: Path) -> str:
    """Calls over WebRTC beside sessions of sockets, and what is heard over them."""
    lines = call_table(documents(results, "calls"))
    if words := newest(results, "words_over_calls"):
        lines += ["", *word_table(words)]
    return "\n".join(lines)


def outside_list(results: Path) -> str:
    """Benchmarks of others."""
    names = ("voicebench", "voice_evals", "full_duplex_bench")
    return "\n".join(outside_lines(*(newest(results, name) for name in names)))


def _link(document: dict) -> str:
    if "device_model" in document:
        return f"the modelled device {document['device_model']['modelled_device']}"
    text = document["config"].get("link")
    if not text:
        return "tiers of one memory"
    gb_per_s, latency_us = text.split(":")
    return f"a modelled link to host memory of {gb_per_s} GB/s and {latency_us} us"


def _row(document: dict, what: str, value: str) -> str:
    return f"| {what} | {value} | {source(document)} |"


TABLES: dict[str, Callable[[Path], str]] = {
    "loads": load_tables,
    "kv_pressure": kv_tables,
    "modelled_turn": modelled_turn_table,
    "best_effort": best_effort_tables,
    "single": single_figures,
    "calls": call_tables,
    "outside": outside_list,
    "speaking": lambda results: "\n".join(speaking_table(documents(results, "speaking"))),
    "speaking_rates": lambda results: "\n".join(speaking_rates(documents(results, "speaking"))),
}
REGIONS = {**TABLES, "baselines": baseline_tables}


def regions_of(page: str) -> list[str]:
    """Names of the tables in a page."""
    return _REGION.findall(page)


def filled(page: str) -> str:
    """The page with its tables written anew."""

    def region(match: re.Match) -> str:
        begin = f"<!-- measured:begin {match[1]} -->"
        return f"{begin}\n{REGIONS[match[1]](RESULTS)}\n{END}"

    return _REGION.sub(region, page)


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
