"""The first token of long sessions whose KV returns from host memory, or from a talker's memory.

    python -m benchmark.scaled_clock 2 lending.reloads --json out.json

A thinker on a modelled device, whose pool holds half of the sessions; the KV of the others is in a
tier that is large enough for all. Some sessions at a time ask for a few tokens, each again and
again, so that every request needs a load and none is computed again. Every second time they are
typed: nothing announces their requests. Otherwise a second of speech does. Arms, in turn, each with
fresh engines:

    host   host memory over the modelled PCIe link
    peer   pages of a talker on another modelled device, over the modelled link between devices
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmark.lending.stages import Pair, running_pair
from benchmark.load.options import check_names, parser_of
from benchmark.load.provenance import config_of, facts
from benchmark.native_client import native_client
from benchmark.slow_load import percentiles, tokens_of
from benchmark.thinker import load_of, spent
from sglang_live.extensions.planner.device_model.model import H100
from sglang_live.messages import UserSpeaking
from sglang_live.stages.engine_link import FeedSocket

ARMS = ("host", "peer")
_POLICIES = ("truncate", "next-use", "preload", "pacing")
_INPUT_TOKENS, _OUTPUT_TOKENS = 32, 2
_SPEECH_S = 1.0
_PAGE = 16
_TOTALS = (
    "tokens_loaded",
    "tokens_preloaded",
    "peer_tokens_loaded",
    "peer_tokens_preloaded",
    "tokens_lost",
    "peer_tokens_lost",
    "prefills_awaited_kv",
    "prefills_awaited_kv_s",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    sessions, history_tokens: how many, and the tokens that each begins with.
    at_once: sessions that ask at the same time.
    returns: how often that happens in each run, half of it typed.
    pause_s: mean pause between two times.
    """

    arms: str = "host,peer"
    sessions: int = 12
    history_tokens: int = 28_000
    at_once: int = 3
    returns: int = 32
    pause_s: float = 3.0
    device_model: str = str(H100)
    repeats: int = 3
    seed: int = 1
    json: str = ""


def thinker_args(arm: str, options: Options) -> dict:
    grown = 2 * options.returns * options.at_once // options.sessions
    session = options.history_tokens + grown * (_INPUT_TOKENS + _OUTPUT_TOKENS + _PAGE)
    return {
        "page_size": _PAGE,
        "max_total_tokens": options.sessions * session // 2,
        "max_running_requests": options.sessions,
        "chunked_prefill_size": options.history_tokens + 1024,
        "mem_fraction_static": 0.5,  # SGLang derives none from so large a chunk
        "enable_hierarchical_cache": True,
        # What is lent comes first: the host of a borrower is as small as SGLang allows.
        "hicache_ratio": 4.0 if arm == "host" else 1.1,
    }


class Sessions:
    """
    Args:
        rng: draws the input and the pauses.
    """

    def __init__(self, pair: Pair, client: httpx.AsyncClient, options: Options, seed: int):
        self._feed = FeedSocket(pair.thinker.spec.socket_path("inbox"))
        self._client, self._options, self._rng = client, options, random.Random(seed)
        self._held = [0] * options.sessions
        self.computed = 0
        self.first_ms: dict[str, list[float]] = {"typed": [], "spoken": []}

    async def begin(self) -> None:
        for n in range(self._options.sessions):
            body = {"capacity_of_str_len": 1 << 40, "session_id": _name(n), "streaming": True}
            (await self._client.post("/open_session", json=body)).raise_for_status()
            await self._ask(n, self._options.history_tokens)

    async def return_all(self) -> None:
        """Each session in turn, some at a time."""
        n_sessions, at_once = self._options.sessions, self._options.at_once
        for time_no in range(self._options.returns):
            await asyncio.sleep(self._rng.expovariate(1 / self._options.pause_s))
            kind = "typed" if time_no % 2 == 0 else "spoken"
            numbers = [(time_no * at_once + n) % n_sessions for n in range(at_once)]
            if kind == "spoken":
                for number in numbers:
                    self._feed.send(UserSpeaking(_name(number)))
                await asyncio.sleep(_SPEECH_S)
            self.first_ms[kind] += await asyncio.gather(
                *(self._ask(number, _INPUT_TOKENS) for number in numbers)
            )

    async def _ask(self, number: int, n_tokens: int) -> float:
        """Returns milliseconds until the first token of the response."""
        ids, asked_s = [self._rng.randrange(10, 200) for _ in range(n_tokens)], time.monotonic()
        came_s, meta = await tokens_of(self._client, ids, _OUTPUT_TOKENS, _name(number))
        # The newest token is computed with the next request in any case.
        self.computed += max(0, self._held[number] - meta["cached_tokens"] - 1)
        self._held[number] += n_tokens + _OUTPUT_TOKENS
        return 1000 * (came_s[0] - asked_s)


def _name(number: int) -> str:
    return f"session-{number}"


async def measure(arm: str, options: Options, seed: int) -> dict:
    lends = arm == "peer"
    talker_args = {
        "page_size": _PAGE,
        "max_total_tokens": 6 * options.sessions * options.history_tokens,
    }
    pair_of = running_pair(
        _POLICIES,
        thinker_args(arm, options),
        talker_args,
        options.device_model,
        lends=lends,
        elastic=False,
        # What computes beneath a modelled device must take less time than the device would.
        shallow=True,
    )
    async with pair_of as pair, native_client(pair.thinker.spec, 180) as client:
        await pair.settle(lends=lends)
        sessions = Sessions(pair, client, options, seed)
        await sessions.begin()
        before = await load_of(pair.thinker)
        await sessions.return_all()
        used = spent(before, after := await load_of(pair.thinker))
    return {
        "arm": arm,
        "ttft_ms": {
            kind: percentiles(np.array(times)) for kind, times in sessions.first_ms.items()
        },
        "computed_again": sessions.computed,
        "peer_slots": after.get("policy_peer_slots", 0.0),
        **{name: used.get(name, 0.0) for name in _TOTALS},
        "preloads": {name: n for name, n in used.items() if name.startswith("preloads") and n},
        "first_ms": sessions.first_ms,
    }


HEAD = (
    f"{'arm':5s} {'typed 50':>8s} {'90':>6s} {'99':>6s} {'spoken 50':>9s} {'90':>6s} {'99':>6s} "
    f"{'computed':>8s} {'from host':>9s} {'from peer':>9s} {'preloaded':>9s} {'awaited':>7s}   "
    "(ms, modelled device)"
)


def line(row: dict) -> str:
    def ends(kind: str, width: int) -> str:
        ttft = row["ttft_ms"][kind]
        return f"{ttft['p50']:{width}.0f} {ttft['p90']:6.0f} {ttft['p99']:6.0f}"

    return (
        f"{row['arm']:5s} {ends('typed', 8)} {ends('spoken', 9)} {row['computed_again']:8d} "
        f"{row['tokens_loaded']:9.0f} {row['peer_tokens_loaded']:9.0f} "
        f"{row['tokens_preloaded'] + row['peer_tokens_preloaded']:9.0f} "
        f"{row['prefills_awaited_kv']:7.0f}"
    )


def main() -> None:
    parser, rows = parser_of(Options(), __doc__), []
    options = Options(**vars(parser.parse_args()))
    check_names(parser, "--arms", options.arms, ARMS)
    print(HEAD, flush=True)
    for repeat in range(options.repeats):
        for arm in options.arms.split(","):
            row = asyncio.run(measure(arm, options, options.seed + repeat))
            rows.append({"repeat": repeat, **row})
            print(line(row), flush=True)
    if options.json:
        document = {
            "benchmark": "lending.reloads",
            **facts(Path(options.device_model)),
            "config": config_of(options),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
