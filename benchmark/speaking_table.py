"""Tables of kept documents of benchmark.speaking, for docs/ and benchmark/notes/."""

from benchmark.load.kept import source
from benchmark.speaking import ARMS, FIRST_AUDIO_MS, SMOOTH

# VoxServe's rate at 500 ms, where the paper says it in words (section 4.2).
_PAPER = {"cosyvoice2": 4, "cosyvoice2_graphs": 4, "cosyvoice2_mps": 4, "orpheus": 10}


def speaking_table(found: list[dict]) -> list[str]:
    """By family: the highest rates within the limits, of families that reach any.

    found: documents, newest first: the newest of each family. Those without bounds had the device
        as one queue, and are left out.
    """
    lines = ["| model | `off` | `all` | VoxServe | bound |", "|---|---|---|---|---|"]
    by_family = _by_family([one for one in found if "streams" in one])
    if not by_family:
        return []
    for family, document in by_family.items():
        arms = [_most(_rows(document, family, arm)) for arm in ("off", "all")]
        stream = document["streams"].get(family)
        bound = min(stream["device_rate"], stream["launch_rate"]) if stream else 0.0
        cells = [f"{rate:g}" if rate else "–" for rate in (*arms, _PAPER.get(family), bound)]
        if any(arms):
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
    return [*lines, "", _sources(by_family)]


def speaking_rates(found: list[dict]) -> list[str]:
    """By family and arm: first audio, and chunks in time, at each rate. found: see above."""
    lines = [
        "| model | MB of a stream, streams | arm | requests/s: first audio P90 / P99 in ms, chunks "
        "in time, requests without a gap |",
        "|---|---|---|---|",
    ]
    by_family = _by_family(found)
    if not by_family:
        return []
    for family, document in by_family.items():
        stream = document.get("streams", {}).get(family)
        size = "–"
        if stream is not None:
            size = f"{stream['kv_mb']:g} KV, {stream['decoder_mb']:g} decoder; {stream['fit']}"
        for arm in ARMS:
            points = [
                f"{row['rate']:g}: {row['first_audio_p90_ms']:.0f} / "
                f"{row['first_audio_p99_ms']:.0f}, {100 * row['in_time']:.1f} %, "
                f"{100 * row['smooth']:.1f} %"
                for row in _rows(document, family, arm)
            ]
            if points:
                lines.append(
                    f"| {_name(document, family)} | {size} | `{arm}` | {'; '.join(points)} |"
                )
    return [*lines, "", _sources(by_family)]


def _by_family(found: list[dict]) -> dict[str, dict]:
    by_family: dict[str, dict] = {}
    for document in found:
        for row in document["rows"]:
            by_family.setdefault(row["family"], document)
    return by_family


def _rows(document: dict, family: str, arm: str) -> list[dict]:
    return [row for row in document["rows"] if (row["family"], row["arm"]) == (family, arm)]


def _name(document: dict, family: str) -> str:
    whole: str = document["device_models"][family]["modelled_device"]
    return whole.partition(", ")[2]


def _sources(by_family: dict[str, dict]) -> str:
    commits = dict.fromkeys(source(one).rpartition("commit ")[2] for one in by_family.values())
    return f"Commits {', '.join(commits)}."


def _most(rows: list[dict]) -> float:
    """The highest rate within the limits; 0: none is."""
    return max(
        (
            row["rate"]
            for row in rows
            if row["first_audio_p90_ms"] <= FIRST_AUDIO_MS and row["smooth"] >= SMOOTH
        ),
        default=0.0,
    )
