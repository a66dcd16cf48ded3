"""A thinker that borrows KV memory from a talker on the same GPU: benchmark.lending, shorter.

With host memory alone, and with lent pages before it. In float32, so that codes of the talker do
not depend on how many responses share a round.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmark.gpu.findings import Findings
from benchmark.gpu.places import gpus_hidden, indexed, platform_of
from benchmark.lending import __main__ as lending

# In float32, without kernels whose sums depend on the batch.
EXACT = {"dtype": "float32", "attention_backend": "torch_native", "disable_cuda_graph": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As of benchmark.lending."""

    sessions: int = 8
    turns: int = 2
    speakers: int = 4


TINY = Options(speakers=1)
ARMS = ("peer", "host")


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    common = lending.Options(
        sessions=options.sessions, max_turns=options.turns, speakers=options.speakers, seed=seed
    )
    schedule = lending.schedule_of(common)
    on_cpu = device == "cpu"
    place = lending.Place(
        device_model="",
        devices=(indexed(device),) * 2,
        engine_args={} if on_cpu else EXACT,
    )
    rows = {}
    print(lending.HEAD.partition("(ms")[0].rstrip(), flush=True)
    with gpus_hidden(on_cpu):
        for arm in ARMS:
            rows[arm] = asyncio.run(lending.measure(arm, common, schedule, place))
            print(lending.line(rows[arm]), flush=True)  # also if the time ends before the next
    return Findings({"platform": platform, "rows": rows}, tuple(judge(rows)), ())


def judge(rows: dict[str, dict[str, Any]]) -> list[str]:
    problems = [f"{arm}: {error}" for arm, row in rows.items() for error in row["errors"]]
    host, peer = rows["host"], rows["peer"]
    if not peer["leases_offered"]:
        problems.append("the talker lends nothing")
    elif not peer["peer_tokens_written"] or not peer["peer_tokens_loaded"]:
        problems.append("no session was kept in lent pages, or none came back")
    if peer["lender"]["wrong"] > host["lender"]["wrong"]:
        problems.append(f"{peer['lender']['wrong']} responses of the lender differ")
    return problems
