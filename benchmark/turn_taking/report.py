"""Figures of all components as rows, and the tables of them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from benchmark.turn_taking.components import TUNED, EndRule, Hearing, hear_ends, hear_interruptions
from benchmark.turn_taking.scoring import (
    delay_at,
    end_figures,
    interruption_figures,
    turn_outcome,
)
from benchmark.turn_taking.timeline import Decision, Recording, Stimulus

CONFIRM_MS = (96, 160, 250, 400, 600, 800, 1000)
FALSE_CUTOFFS = 0.05

SHARE_HEAD = f"**Delay of the end at {100 * FALSE_CUTOFFS:g} % false cut-offs**, by interpolation:"
INTERRUPTION_HEAD = (
    "**While the agent speaks**, with `ignore_echo`, `ignore_backchannels` and `ignore_side_talk` "
    "off and on. Only of an `interruption` should the agent stop; the reaction counts from the "
    "sound's onset:"
)


def end_rows(
    recordings: Sequence[tuple[Recording, Hearing]], rules: Iterable[EndRule]
) -> list[dict]:
    """One row for each rule and kind of recording, and one for all of them."""
    rows = []
    for rule in rules:
        decided = [(recording, hear_ends(hearing, rule)) for recording, hearing in recordings]
        rows += rows_of(rule.component, rule.setting, decided)
    return rows


def rows_of(
    component: str, setting: str, decided: Sequence[tuple[Recording, Sequence[Decision]]]
) -> list[dict]:
    """One row for each kind of recording, and one for all of them."""
    outcomes = [
        (recording.source, turn_outcome(turn, decisions))
        for recording, decisions in decided
        for turn in recording.turns
    ]
    rows = []
    for source in ["all", *sorted({source for source, _ in outcomes})]:
        figures = end_figures(o for kind, o in outcomes if source in ("all", kind))
        own = {"component": component, "setting": setting, "source": source}
        rows.append(own | asdict(figures))
    return rows


def delays_at_share(rows: Sequence[dict]) -> list[dict]:
    """Median and P90 of each component with a curve, at FALSE_CUTOFFS."""
    found = []
    for component in dict.fromkeys(row["component"] for row in rows):
        for source in dict.fromkeys(row["source"] for row in rows):
            own = [r for r in rows if r["component"] == component and r["source"] == source]
            entry = {"component": component, "source": source, "false_cutoffs": FALSE_CUTOFFS}
            for which in ("delay_p50_ms", "delay_p90_ms"):
                points = [
                    (row["false_cutoffs"], row[which])
                    for row in own
                    if None not in (row["false_cutoffs"], row[which])
                ]
                entry[which] = delay_at(points, FALSE_CUTOFFS)
            found.append(entry)
    return found


def interruption_rows(
    heard: Sequence[tuple[Stimulus, Hearing]], confirm_ms: Iterable[int]
) -> list[dict]:
    """One row for each confirmation time and kind of stimulus, with all `ignore_…` off and on."""
    by_kind: dict[str, list[tuple[Stimulus, Hearing]]] = {}
    for each in heard:
        by_kind.setdefault(each[0].kind, []).append(each)
    rows = []
    for confirm in confirm_ms:
        for kind, own in by_kind.items():
            for ignores in (False, True):
                decided = [(s.onset_ms, hear_interruptions(h, confirm, ignores)) for s, h in own]
                row = {"confirm_ms": confirm, "kind": kind, "ignores": ignores}
                rows.append(row | asdict(interruption_figures(decided)))
    return rows


def end_table(rows: Sequence[dict], source: str = "all") -> list[str]:
    """Every setting but those of TUNED, which has two parameters and so no curve."""
    lines = [
        "| component | setting | false cut-offs | delay, P50 / P90 | missed ends |",
        "|---|---|---|---|---|",
    ]
    shown = (row for row in rows if row["source"] == source and row["component"] != TUNED)
    for row in shown:
        cut = f"{_share(row['false_cutoffs'])} ({row['cut_pauses']} of {row['pauses']})"
        delay = f"{_ms(row['delay_p50_ms'])} / {_ms(row['delay_p90_ms'])} ms"
        missed = f"{row['missed']} of {row['turns']}"
        lines.append(f"| `{row['component']}` | {row['setting']} | {cut} | {delay} | {missed} |")
    return lines


def share_table(rows: Sequence[dict]) -> list[str]:
    lines = ["| component | recordings | P50 | P90 |", "|---|---|---|---|"]
    for row in rows:
        p50, p90 = (_ms(row[name], " ms") for name in ("delay_p50_ms", "delay_p90_ms"))
        lines.append(f"| `{row['component']}` | {row['source']} | {p50} | {p90} |")
    return lines


def interruption_table(rows: Sequence[dict], confirm_ms: int) -> list[str]:
    lines = [
        "| sound | `ignore_…` | n | the agent stops | 95 % interval | only held, the longest "
        "| reaction, P50 / P90 / P95 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if row["confirm_ms"] == confirm_ms):
        early = f", {row['early_stops']} before the onset" if row["early_stops"] else ""
        reaction = " / ".join(_ms(row[f"reaction_{p}_ms"]) for p in ("p50", "p90", "p95"))
        between = f"{_share(row['stopped_low'])} to {_share(row['stopped_high'])}"
        stopped = f"{_share(row['stopped'])}{early}"
        held = f"{row['holds']}, {_ms(row['longest_hold_ms'], ' ms')}" if row["holds"] else "0"
        ignore = "on" if row["ignores"] else "off"
        cells = row["kind"], ignore, str(row["n"]), stopped, between, held, f"{reaction} ms"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{100 * value:.0f} %"


def _ms(value: float | None, unit: str = "") -> str:
    return "n/a" if value is None else f"{value:.0f}{unit}"
