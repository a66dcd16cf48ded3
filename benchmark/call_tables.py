"""Tables of kept documents of calls, and of others' benchmarks, for docs/ and benchmark/notes/."""

from statistics import median

from benchmark.load.kept import one, share, source

_CALL_COLUMNS = (
    "calls",
    "transport",
    "loss, jitter",
    "CPU per second of a call: gateway",
    "process of calls",
    "memory at the start and the end: gateway",
    "process of calls",
    "speech found",
    "drift",
    "first sound, P50 / P90",
    "stop, P50 / P90",
    "last sound, P50 / P90",
    "late frames",
)


def call_table(found: list[dict]) -> list[str]:
    """found: documents of benchmark.calls, newest first: the newest of each number of calls."""
    by_calls: dict[int, dict] = {}
    for document in found:
        by_calls.setdefault(document["options"]["calls"], document)
    lines = []
    for n_calls, document in sorted(by_calls.items()):
        minutes = document["options"]["seconds"] / 60
        lines += ["", f"{n_calls} calls, {minutes:g} min an arm. {source(document)}.", ""]
        lines += [f"| {' | '.join(_CALL_COLUMNS)} |", "|---" * len(_CALL_COLUMNS) + "|"]
        for arm in document["arms"]:
            cells = (
                str(n_calls),
                arm["transport"],
                f"{100 * arm['loss']:.0f} %, {arm['jitter_ms']:.0f} ms",
                f"{arm['gateway_ms_per_s']:.1f} ms",
                f"{arm['calls_ms_per_s']:.1f} ms",
                *(f"{mb[0]:.0f}, {mb[-1]:.0f} MB" for mb in (arm["gateway_mb"], arm["calls_mb"])),
                f"{arm['n_found']} of {arm['n_utterances']}",
                one(arm["drift_ms"]),
                *(_pair(arm[name]) for name in ("first_sound_ms", "stop_ms", "sound_stop_ms")),
                share(arm["late_share"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines[1:]


def word_table(document: dict) -> list[str]:
    lines = [
        f"Transcripts over WebRTC. {source(document)}.",
        "",
        "| loss, jitter | transcripts | as without loss | word errors |",
        "|---|---|---|---|",
    ]
    for arm in document["arms"]:
        lines.append(
            f"| {100 * arm['loss']:.0f} %, {arm['jitter_ms']:.0f} ms | {len(arm['heard'])} | "
            f"{arm['n_equal']} | {share(arm['errors'] / arm['words'])} |"
        )
    return lines


def outside_lines(
    voicebench: dict | None, voice_evals: dict | None, full_duplex: dict | None
) -> list[str]:
    """What others' benchmarks say of the demo model's server. None: not measured."""
    lines = []
    if voicebench:
        found = voicebench["summary"]
        answer = _spread(found["response_latency_ms"])
        stop = _spread(found["barge_in_stop_ms"])
        lines.append(
            f"{voicebench['suite']}: answer {answer}, stop {stop}; "
            f"{share(found['barge_in_success_rate'])} of interruptions stop it, and "
            f"{found['false_barge_ins']} of {found['noise_turns']} noises; "
            f"{share(found['mean_wer'])} word errors"
        )
    if voice_evals:
        results = [session["result"] for session in voice_evals["sessions"]]
        scored = [result for result in results if result["samples"]]
        turns = [result["probe"]["turn_latency"]["e2e_p50_ms"] for result in scored]
        stops = [result["median_barge_in_stop_ms"] for result in scored]
        tasks, told, errors = (
            share(_mean([result[name] for result in scored]))
            for name in ("task_completion", "fact_coverage", "mean_wer")
        )
        lines.append(
            f"{voice_evals['suite']}, {len(scored)} of {len(results)} calls scored: answer "
            f"{one(_median(turns))}, stop {one(_median(stops))}, {tasks} of tasks, {told} of "
            f"facts, {errors} word errors"
        )
    if full_duplex:
        turns = [
            f"{row['task'].removesuffix('_example')} {_taken(row)}" for row in full_duplex["rows"]
        ]
        lines.append(f"{full_duplex['suite']}, its three public examples: {', '.join(turns)}")
    found = [one for one in (voicebench, voice_evals, full_duplex) if one]
    where = "; ".join(dict.fromkeys(source(document) for document in found))
    return [*(f"- {line}" for line in lines), *(["", f"{where}."] if found else [])]


def _taken(row: dict) -> str:
    if not row["takes_turn"]:
        return "no turn"
    return "a turn" if row["latency_s"] is None else f"after {row['latency_s']:.2f} s"


def _spread(stats: dict) -> str:
    return f"{stats['p50']:.0f} / {one(stats['p90'])} (n = {stats['count']})"


def _pair(figures: list[float]) -> str:
    return " / ".join(f"{ms:.0f}" for ms in figures) + " ms" if figures else "n/a"


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
