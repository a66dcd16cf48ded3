"""Tables of stored results, for docs/benchmarks.md."""

from typing import Any

NAMES = {
    "heard alone": "heard alone, policies without `hybrid`",
    "stock, heard alone": "heard alone, stock SGLang",
    "fcfs": "stock SGLang",
    "priority": "stock SGLang, priority scheduling with preemption",
    "bros": "BROS by the letter",
    "live": "policies without `hybrid`",
    "hybrid": "policies with `hybrid`",
}


def title(document: dict[str, Any]) -> str:
    config = document["config"]
    heard = {
        "voice": "turns of voice sessions",
        "chat": "chats without a cached prompt, spoken",
    }[config["kind"]]
    return f"{heard} beside best-effort work with the lengths of a {config['best_effort']} service"


def conditions(document: dict[str, Any]) -> str:
    config, objectives = document["config"], document["objectives"]
    return (
        f"Simulated: one thinker, a pool of {config['pool_tokens']:,} tokens, "
        f"{config['in_flight']} best-effort requests in flight, {config['seconds']:.0f} s for each "
        f"of {len(config['seeds'])} seeds. The capacity is {document['capacity_per_s']:.1f} turns "
        f"per second; objectives are a first token within {objectives['ttft_s']:g} s, and none "
        "more than 0.1 s after its time in the speech."
    )


def table(document: dict[str, Any]) -> list[str]:
    lines = [
        "| load | arm | first token, P50 / P99 | within objectives | continuous "
        "| best effort, tokens/s | of the idle share |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["summary"]:
        if row["arm"] not in NAMES:
            continue
        work = row["be_tokens_per_s"]
        cells = (
            f"{100 * row['load']:.0f} %",
            NAMES[row["arm"]],
            f"{1000 * row['ttft_p50_s']:.0f} / {1000 * row['ttft_p99_s']:.0f} ms",
            f"{100 * row['attained']:.1f} %",
            f"{100 * row['continuous']:.1f} %",
            f"{work:,.0f}" if work else "—",
            f"{100 * work / row['bound_tokens_per_s']:.0f} %" if work else "—",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
