"""Tables of kept documents of voice_load, for docs/ and benchmark/notes/.

A document of a modelled device has a table of its own, whose title names the device: its times are
those of the model.
"""

_USUAL_MODEL = "demo-random"
_COLUMNS = (
    "users",
    "policies",
    "TTFP after end of turn, P50 / P90",
    "continuous",
    "waste",
    "stop latency, P95",
    "turns/s",
    "n",
    "failed",
    "late frames",
)


def loads(found: list[dict]) -> dict[str, list[tuple[dict, list[dict]]]]:
    """By kind of load: a document and its points for each number of users.

    Args:
        found: documents, newest first.

    Of several documents with the same number of users, the one with the most repeats is taken;
    among equals, the newest.
    """
    kinds: dict[str, dict[int, tuple[dict, list[dict]]]] = {}
    for document in sorted(found, key=lambda d: d["config"].get("repeats", 1), reverse=True):
        by_users = kinds.setdefault(_kind(document), {})
        for n_users in {point["sessions"] for point in document["points"]} - by_users.keys():
            points = [p for p in document["points"] if p["sessions"] == n_users]
            by_users[n_users] = document, points
    return {kind: [kinds[kind][n] for n in sorted(kinds[kind])] for kind in sorted(kinds)}


def _kind(document: dict) -> str:
    config = document["config"]
    what, model = _load(config), config.get("model_path", _USUAL_MODEL)
    if model != _USUAL_MODEL:
        what += f", with the model `{model}`"
    if bound := config.get("max_tokens"):
        what += f", responses of at most {bound} tokens"
    if "--thinker.enable-hierarchical-cache" in config.get("server_args", ()):
        what += ", with HiCache in the thinker"
    if device := document.get("device_model"):
        what += f", on the modelled device {device['modelled_device']}"
    return what


def _load(config: dict) -> str:
    if storm := config.get("storm"):
        what = "Storms: {sessions} messages of {clip_s:g} s every {period_s:g} s beside the users"
        return what.format(**storm)
    if rates := config.get("open_loop_rps"):
        arrivals = "in the bursts of a trace" if config["trace_arrivals"] else "at random"
        per_s = " and ".join(f"{rate:g}" for rate in rates)
        what = f"Open loop: {per_s} users a second arrive {arrivals}"
        return f"{what}, interruptions with probability {config['barge_in']:g}"
    if len(config["policies"]) > 2:
        return f"Ablation: interruptions with probability {config['barge_in']:g}"
    if config.get("barge_in"):
        return f"Interruptions with probability {config['barge_in']:g}"
    return "Conversations without interruptions"


def load_table(measured: list[tuple[dict, list[dict]]]) -> list[str]:
    """One line per number of users and arm. On a modelled device with the lateness of results."""
    modelled = any("device_model" in document for document, _ in measured)
    columns = (*_COLUMNS, "late results") if modelled else _COLUMNS
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for document, points in measured:
        for point in points:
            own = point["ttfp_after_detection_ms"]
            cells = [
                str(point["sessions"]),
                f"`{point['policies']}`",
                f"{one(own['p50'], '{:.0f}')} / {one(own['p90'])}",
                share(point["continuity"]),
                share(point.get("waste")),
                one(point.get("stop_latency_ms", {}).get("p95")),
                f"{turns_per_s(document, point):.2f}",
                str(own["n"]),
                str(point["failed"]),
                share(point.get("late_frames")),
            ]
            if modelled:
                cells.append(share(late_results(_runs(document, point))))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def turns_per_s(document: dict, point: dict) -> float:
    """Turns per second, from the first turn's start until the last response was heard.

    Taken from the single turns, because a response that starts early does not end a turn.
    """
    runs = [run["turns"] for run in _runs(document, point)]
    wall_s = sum(max(map(_heard_until_s, t)) - min(turn["start_s"] for turn in t) for t in runs)
    return sum(map(len, runs)) / wall_s


def late_results(runs: list[dict]) -> float:
    """Lateness of results as a share of the modelled time, of the stage with the largest share."""
    total: dict[str, list[float]] = {}
    for run in runs:
        for stage, times in run["device"].items():
            late = total.setdefault(stage, [0.0, 0.0])
            late[0] += times["late_s"]
            late[1] += times["modelled_s"]
    return max(late_s / modelled_s for late_s, modelled_s in total.values())


def _runs(document: dict, point: dict) -> list[dict]:
    arm = point["policies"], point["sessions"]
    return [run for run in document["runs"] if (run["policies"], run["sessions"]) == arm]


def _heard_until_s(turn: dict) -> float:
    if turn["cut_short"] or turn["ttfp_ms"] is None:
        return turn["end_s"]
    began_s = turn["start_s"] + turn["user_audio_s"] + turn["ttfp_ms"] / 1000
    return max(turn["end_s"], began_s + turn["audio_s"] + sum(turn["gaps_ms"]) / 1000)


def conditions(measured: list[tuple[dict, list[dict]]]) -> str:
    """Device and commit of a table's rows, by numbers of users where they differ."""
    users: dict[str, list[str]] = {}
    for document, points in measured:
        users.setdefault(source(document), []).append(str(points[0]["sessions"]))
    if len(users) == 1:
        return f"{next(iter(users))}."
    return "; ".join(f"{', '.join(n)} users: {where}" for where, n in users.items()) + "."


def source(document: dict) -> str:
    changed = ", changed checkout" * document.get("git_dirty", False)
    return f"{document['device']}, commit {document['git_commit'][:9]}{changed}"


def share(value: float | None) -> str:
    return one(None if value is None else 100 * value, "{:.1f} %")


def one(value: float | None, form: str = "{:.0f} ms") -> str:
    return "n/a" if value is None else form.format(value)
