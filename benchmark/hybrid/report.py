"""Lines and tables of results, for the terminal and for benchmark/notes/hybrid.md."""

from typing import Any

import numpy as np

# Best-effort work alone, and listeners alone: what the others are compared with.
ALONE, STOCK_ALONE, LIVE_ALONE = "best-effort alone", "stock, heard alone", "heard alone"

NAMES = {
    STOCK_ALONE: "heard alone, stock SGLang",
    LIVE_ALONE: "heard alone, policies without `hybrid`",
    "fcfs": "stock SGLang",
    "priority": "stock SGLang, priority scheduling with preemption",
    "bros": "BROS by the letter",
    "bros-bounded": "BROS with bounded prefills",
    "live": "policies without `hybrid`",
    "hybrid": "policies with `hybrid`",
}


def title(document: dict[str, Any]) -> str:
    config = document["config"]
    heard = {
        "voice": "turns of voice sessions",
        "chat": "chats without a cached prompt, spoken",
    }[config["kind"]]
    where = "simulated"
    if is_of_engine(document):
        device = "on a modelled device" if config["device_model"] else "on this machine"
        where = f"by a running engine {device}"
    return f"{heard} beside work with the lengths of a {config['best_effort']} service, {where}"


def conditions(document: dict[str, Any]) -> str:
    config, objectives = document["config"], document["objectives"]
    how = "Simulated: one thinker"
    if is_of_engine(document):
        how = "A running thinker, prompts, pool and chunk sent with " + (
            f"one token for {config['divisor']}" if config["divisor"] > 1 else "all tokens"
        )
    return (
        f"{how}, a pool of {config['pool_tokens']:,} tokens, "
        f"{config['in_flight']} best-effort requests in flight, {config['seconds']:.0f} s for each "
        f"of {len(config['seeds'])} seeds. The capacity is {document['capacity_per_s']:.1f} turns "
        f"per second; objectives are a first token within {objectives['ttft_s']:g} s, and none "
        "more than 0.1 s after its time in the speech."
    )


def is_of_engine(document: dict[str, Any]) -> bool:
    return bool(document["benchmark"] == "hybrid")


def table(document: dict[str, Any]) -> list[str]:
    heads = ["load", "arm", "first token, P50 / P99", "within objectives", "continuous"]
    heads += ["best effort, tokens/s", "of the idle share"]
    if is_of_engine(document):
        heads += ["policies, per round", "requeued, retracted", "late results"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    arms = list(NAMES)
    rows = [row for row in document["summary"] if row["arm"] in NAMES]
    for row in sorted(rows, key=lambda row: (row["load"], arms.index(row["arm"]))):
        work, most = row["be_tokens_per_s"], row["bound_tokens_per_s"]
        cells = [
            f"{100 * row['load']:.0f} %",
            NAMES[row["arm"]],
            f"{1000 * row['ttft_p50_s']:.0f} / {1000 * row['ttft_p99_s']:.0f} ms",
            f"{100 * row['attained']:.1f} %",
            f"{100 * row['continuous']:.1f} %",
            f"{work:,.0f}" if work else "—",
            f"{100 * work / most:.0f} %" if work and most else "—",
        ]
        if is_of_engine(document):
            cells += _engine_cells(row)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _engine_cells(row: dict[str, Any]) -> list[str]:
    cost = f"{1000 * row['policy_ms']:.0f} µs" if "policy_ms" in row else "—"
    moves = "—"
    if row.get("requeued") is not None and row["be_tokens_per_s"]:
        moves = f"{row['requeued']:.0f}, {row['retracted']:.0f}"
    return [cost, moves, f"{100 * row['late']:.0f} %" if "late" in row else "—"]


def batch_table(document: dict[str, Any]) -> list[str]:
    """Of benchmark.hybrid.beside_batch: both kinds of blocks, and how far those of one differ."""
    heads = ["users", "first audio after the end of turn, P50 / P90", "P50 of each block"]
    heads += ["useful", "continuous", "turns", "batch, tokens/s"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    kinds, blocks = document["summary"][:2], document["summary"][2:]
    for row in kinds:
        own = [block for block in blocks if block["arm"].startswith(row["arm"])]
        medians = sorted(_ms(block["first_audio_p50_ms"]) for block in own)
        cells = (
            row["arm"],
            f"{_ms(row['first_audio_p50_ms'])} / {_ms(row['first_audio_p90_ms'])} ms",
            f"{', '.join(medians)} ms",
            f"{100 * row['useful']:.0f} %",
            f"{100 * row['continuous']:.0f} %",
            str(row["n"]),
            f"{row['batch_tokens_per_s']:,.0f}" if row["batch_lines"] else "—",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f}"


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['load']:4.0%} {row['arm']:<20} seed {row['seed']}: "
        f"first token {row['ttft_p50_s']:.3f} / {row['ttft_p99_s']:.3f} s, "
        f"within objectives {row['attained']:.4f}, continuous {row['continuous']:.4f}, "
        f"best effort {row['be_tokens_per_s']:.0f}"
        + (f" of {row['bound_tokens_per_s']:.0f}" if "bound_tokens_per_s" in row else "")
        + " tokens/s"
        + (f", late {row['late']:.0%}" if "late" in row else "")
    )


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds; of the times the mean of each seed's quantile."""
    kept = ("ttft_p50_s", "ttft_p99_s", "attained", "continuous", "normalised_s")
    kept += ("be_tokens_per_s", "bound_tokens_per_s", "recomputed_tokens", "requeued", "policy_ms")
    kept += ("retracted", "late")
    found: dict[tuple[float, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["load"], row["arm"]), []).append(row)
    return [
        {"load": load, "arm": arm, "n": sum(row["n"] for row in group)}
        | {
            name: round(float(np.mean([row[name] for row in group])), 5)
            for name in kept
            if name in group[0]
        }
        for (load, arm), group in sorted(found.items(), key=lambda item: item[0][0])
    ]
