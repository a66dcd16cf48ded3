"""Voice sessions on a whole server whose thinker has too little memory for their KV, by policy.

    python -m benchmark.voice_pressure --device-model FILE --link-gb-per-s 1.4 --json out.json

Users speak, listen and speak again through the gateway, as in benchmark.voice_load (workload W2).
With --history-words each session begins with a long written message, as after a long call, and
retention has no window. The thinker's pool has a share of the most KV that all sessions hold at one
time, which a first run with enough memory measures. Every run has a fresh server, with all policies
but `admission` and `preheat`, which would compute lost KV while the user speaks:

    stock      SGLang alone, whose clients send the whole conversation with each turn
    stock+host the same, with a tier in host memory: what LiveServe compares with
    sessions   no policy: SGLang's sessions, whose KV stays until they close
    recompute  evicted KV is computed again, and evicted by least recent use
    lru        it is copied to the host, and loaded by the request that needs it
    next-use   evicted by next use
    preload    and loaded while the user speaks

Loads that a request waits for are on the path of its turn; those that preload has completed before
are hidden.
"""

import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.load.config import LoadConfig, Run
from benchmark.load.link_speed import with_link
from benchmark.load.options import check_names, parser_of
from benchmark.load.point import RunResult, Workload, measure, result_to_json
from benchmark.load.provenance import config_of, facts
from benchmark.load.report import LATE_FRAMES_LIMIT, collect
from benchmark.load.server import LAUNCH_SERVER, STOCK, ServerError
from sglang_live.policy.policies import POLICIES

_PAGE_TOKENS = 16
# More than a turn of the clips and its response have; a word has fewer than two tokens.
_MOST_TURN_TOKENS = 1024
_WITHOUT_HINTS = "benchmark.load.without_hints"
_BASE = tuple(name for name in POLICIES if name not in ("admission", "preheat", "preload"))


@dataclass(frozen=True, slots=True)
class Arm:
    """
    host: whether the thinker has a tier in host memory.
    policies: joined by +.
    """

    host: bool = True
    hints: bool = True
    policies: str = "+".join(_BASE)


ARMS = {
    "stock": Arm(host=False, policies=STOCK),
    "stock+host": Arm(policies=STOCK),
    "sessions": Arm(host=False, policies="off"),
    "recompute": Arm(host=False, hints=False),
    "lru": Arm(hints=False),
    "next-use": Arm(),
    "preload": Arm(policies="+".join((*_BASE, "preload"))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    pool_shares: sizes of the pool, as shares of the most KV that all sessions hold at one time.
    device_model: file of a device model; empty: the machine itself.
    link_gb_per_s: speed of its link in both directions, instead of the file's own; 0: that.
    history_words: of a written message with which each session begins, as after a long call.
    """

    arms: str = ",".join(ARMS)
    pool_shares: str = "0.5"
    sessions: int = 8
    turns: int = 6
    barge_in: float = 0.0
    device_model: str = ""
    link_gb_per_s: float = 0.0
    history_words: int = 0
    repeats: int = 1
    seed: int = 1
    json: str = ""


def main() -> int:
    options = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(options, device_model(options, Path(folder)))
        try:
            document = {
                "benchmark": "voice_pressure",
                **facts(config.device_model),
                "config": config_of(options),
                **run_all(options, config),
            }
        except ServerError as error:
            print(error, file=sys.stderr)
            return 1
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


def run_all(options: Options, config: LoadConfig) -> dict[str, Any]:
    workload = Workload.load(config)
    enough = options.sessions * (_MOST_TURN_TOKENS * options.turns + 2 * options.history_words)
    whole = one_run(options, config, workload, "preload", enough, 0)
    working_set = whole.most_kv_tokens
    print(f"all sessions hold {working_set} tokens at most\n{_HEAD}", flush=True)
    rows = [row_of("enough memory", 1.0, working_set, 0, whole)]
    print(line(rows[0]), flush=True)
    for repeat in range(options.repeats):
        for share in (float(share) for share in options.pool_shares.split(",")):
            tokens = int(share * working_set) // _PAGE_TOKENS * _PAGE_TOKENS
            for arm in options.arms.split(","):
                result = one_run(options, config, workload, arm, tokens, repeat)
                rows.append(row_of(arm, share, tokens, repeat, result))
                print(line(rows[-1]), flush=True)
    return {"working_set_tokens": working_set, "rows": rows}


def one_run(
    options: Options,
    config: LoadConfig,
    workload: Workload,
    name: str,
    pool_tokens: int,
    repeat: int,
) -> RunResult:
    """pool_tokens: of the thinker."""
    arm = ARMS[name]
    args = [f"--thinker.page-size={_PAGE_TOKENS}", f"--thinker.max-total-tokens={pool_tokens}"]
    if options.history_words:
        args.append("--retention-window=0")
    if arm.host:
        args += ["--thinker.enable-hierarchical-cache", "--thinker.hicache-ratio=8"]
    config = replace(
        config,
        server_args=tuple(args),
        server_module=LAUNCH_SERVER if arm.hints else _WITHOUT_HINTS,
    )
    return measure(config, Run(repeat, options.sessions, arm.policies), workload)


def load_config(options: Options, model: Path | None) -> LoadConfig:
    return LoadConfig(
        sessions=(options.sessions,),
        turns=options.turns,
        barge_in=options.barge_in,
        seed=options.seed,
        device_model=model,
        drawn_replies=True,
        history_words=options.history_words,
        kv=True,
    )


def device_model(options: Options, folder: Path) -> Path | None:
    """The device model's file, a copy of it if its link is given a speed."""
    if not options.device_model:
        return None
    path = Path(options.device_model)
    return with_link(path, options.link_gb_per_s, folder) if options.link_gb_per_s else path


def row_of(arm: str, share: float, tokens: int, repeat: int, result: RunResult) -> dict[str, Any]:
    (point,) = collect([result])
    return {
        "arm": arm,
        "pool_share": share,
        "pool_tokens": tokens,
        "repeat": repeat,
        "point": asdict(point),
        **result_to_json(result),
    }


def hidden_share(kv: dict[str, float]) -> float | None:
    """Of the tokens that were loaded from the host, those that no request waited for."""
    loaded, preloaded = kv.get("tokens_loaded", 0.0), kv.get("tokens_preloaded", 0.0)
    return preloaded / (loaded + preloaded) if loaded + preloaded else None


def line(row: dict[str, Any]) -> str:
    point, kv = row["point"], row.get("kv", {})  # a server without policies says nothing of its KV
    times, hidden = point["ttfp_after_detection_ms"], hidden_share(kv)
    late = "  late frames" if row["late_frames"] > LATE_FRAMES_LIMIT else ""
    return (
        f"{row['arm']:13s} {row['pool_share']:5.2f} {point['completed']:5d} {point['failed']:6d} "
        f"{_whole(times['p50'])} {_whole(times['p90'])} {_percent(point['continuity'])} "
        f"{kv.get('tokens_evicted', 0):8.0f} {kv.get('tokens_lost', 0):8.0f} "
        f"{kv.get('loads', 0):6.0f} {1000 * kv.get('reload_s', 0):10.0f} {_percent(hidden)}{late}"
    )


_HEAD = (
    f"{'arm':13s} {'pool':>5s} {'turns':>5s} {'failed':>6s} {'50 ms':>7s} {'90 ms':>7s} "
    f"{'cont.':>7s} {'evicted':>8s} {'lost':>8s} {'loads':>6s} {'on path ms':>10s} {'hidden':>7s}"
)


def _whole(value: float | None) -> str:
    return f"{'n/a':>7s}" if value is None else f"{value:7.0f}"


def _percent(share: float | None) -> str:
    return f"{'n/a':>7s}" if share is None else f"{share:7.1%}"


def parse_args() -> Options:
    parser = parser_of(Options(), __doc__)
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--arms", options.arms, ARMS)
    shares = options.pool_shares.split(",")
    if not all(re.fullmatch(r"\d*\.?\d+", share) and 0 < float(share) <= 1 for share in shares):
        parser.error("--pool-shares reads shares from 0 to 1, as in 0.25,0.5,1")
    if options.history_words < 0:
        parser.error("--history-words must not be negative")
    return options


if __name__ == "__main__":
    sys.exit(main())
