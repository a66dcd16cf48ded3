"""The figures of losses, and their tables."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmark.failover.losses import Row

KILLED = ("thinker", "talker", "vocoder")
_TIMES = ("text_ms", "audio_ms", "silent_ms", "resumed_ms")


def figures_of(rows: Sequence["Row"]) -> list[dict[str, Any]]:
    """One entry per arm. Losses that hit no job count in `without_effect` alone."""
    found = []
    for arm in dict.fromkeys(row.arm for row in rows):
        own = [row for row in rows if row.arm == arm]
        hit = [row for row in own if arm not in (*KILLED, "silent") or row.moved]
        entry: dict[str, Any] = {"arm": arm, "n": len(hit), "without_effect": len(own) - len(hit)}
        for name in _TIMES:
            values = [value for row in hit if (value := getattr(row, name)) is not None]
            entry[name] = quantiles(values)
        entry["busy"] = round(float(np.median([row.busy for row in own])), 3)
        found.append(entry)
    return found


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p90, most = np.percentile(values, (50, 90, 100)).round(1).tolist()
    return {"p50": p50, "p90": p90, "max": most}


def differences(paths: dict[str, Sequence[float]]) -> dict[str, str]:
    """First audio of each path less that of the path before it, turn by turn: the median, and its
    interval of 95 % by order statistics. Turns of one number follow each other at once."""
    names, found = list(paths), {}
    for one, other in zip(names[1:], names, strict=False):
        apart = np.sort(np.subtract(paths[one], paths[other]))
        n = len(apart)
        rank = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
        low, high = apart[rank], apart[n - 1 - rank]
        found[f"{one} - {other}"] = f"{np.median(apart):.1f} ms ({low:.1f} to {high:.1f})"
    return found


def table(found: dict[str, Any]) -> str:
    lines = [
        "| lost | n | longest wait for text, P50 / P90 | for audio | silence that is heard | "
        "session resumed after |",
        "|---|---|---|---|---|---|",
    ]
    for entry in found["figures"]:
        cells = [entry["arm"], entry["n"], *(_cell(entry[name]) for name in _TIMES)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if found["drains"]:
        n, turns = len(found["drains"]["drained_ms"]), found["drains"]["turns"]
        took = _cell(quantiles(found["drains"]["drained_ms"]))
        lines.append(f"\n{n} hosts drained: {took} each; turns meanwhile: {turns}")
    for path, ms in found["first_audio_ms"].items():
        lines.append(f"first audio, {path}: {_cell(quantiles(ms))}, n {len(ms)}")
    for pair, apart in differences(found["first_audio_ms"]).items():
        lines.append(f"turn by turn, {pair}: {apart}, 95 %")
    return "\n".join(lines)


def _cell(found: dict[str, float] | None) -> str:
    return "–" if found is None else f"{found['p50']:g} / {found['p90']:g} ms"


def loss_lines(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What was lost, and how the response went on, by kind: for a table of single figures."""
    found = {entry["arm"]: entry for entry in document["figures"]}
    lines: dict[str, tuple[str, str]] = {}
    if named := [arm for arm in (*KILLED, "undisturbed") if arm in found]:
        parts = [f"{arm} {_cell(found[arm]['audio_ms'])}" for arm in named]
        parts += [f"{arm} silent for {_cell(found[arm]['silent_ms'])}" for arm in named]
        n = min(found[arm]["n"] for arm in named)
        what = f"a stage is killed in a response, {n} times each: longest wait for audio, P50 / P90"
        lines["killed"] = what, ", ".join(parts)
    if silent := found.get("silent"):
        what = f"a host stands still in a response, {silent['n']} times: the same"
        heard = f"{_cell(silent['audio_ms'])}, silent for {_cell(silent['silent_ms'])}"
        lines["silent"] = what, heard
    if gateway := found.get("gateway"):
        what = f"a gateway is killed in a response, {gateway['n']} times: session resumed, audio"
        parts = [_cell(gateway[name]) for name in ("resumed_ms", "audio_ms")]
        lines["gateway"] = what, ", ".join(parts)
    if drains := document["drains"]:
        took, turns = quantiles(drains["drained_ms"]), sum(drains["turns"].values())
        what = f"a host with all stages drains, {len(drains['drained_ms'])} times"
        failed = drains["turns"].get("failed", 0)
        lines["drain"] = what, f"{_cell(took)}; {failed} of {turns} turns failed"
    if paths := document["first_audio_ms"]:
        n = min(map(len, paths.values()))
        parts = [f"{path} {_cell(quantiles(ms))}" for path, ms in paths.items()]
        parts += [f"{pair} {apart}" for pair, apart in differences(paths).items()]
        what = f"first audio with a server's own stages, on hosts, with a journal, {n} each; paired"
        lines["path"] = what, ", ".join(parts)
    return lines
