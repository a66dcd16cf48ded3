"""How much speech the server makes of texts, heard at once or not (`service_tier` flex).

    python -m benchmark.speech_throughput --texts 1000 --concurrency 16 --json out.json

Requests to /v1/audio/speech, always `--concurrency` at a time. Both arms run on one server, in
blocks of texts that alternate, so that a change of the machine's speed meets both. Inverse RTF is
seconds of audio per second; latency is the time to the complete file.
"""

import asyncio
import itertools
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from sglang_live.extensions.planner.simulation.load.stats import percentile

QUESTIONS = Path(__file__).parent / "workloads" / "questions.jsonl"
ARMS = {"streaming": "auto", "throughput": "flex"}
BYTES_PER_S = 2 * 24_000
_START_TIMEOUT_S = 600.0
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """blocks: in which the texts of each arm are divided. policies: see benchmark.voice_load."""

    model_path: str = "demo"
    policies: str = "all"
    texts: int = 1000
    concurrency: int = 16
    blocks: int = 4
    json: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request. status: 200, or why it failed. began_s, took_s: on the client's clock."""

    arm: str
    block: int
    status: str
    audio_s: float
    began_s: float
    took_s: float


def texts(n: int) -> list[str]:
    """Sentences of the questions, again and again with a number in front, so that all differ."""
    documents = [json.loads(line) for line in QUESTIONS.read_text("utf-8").splitlines()]
    whole = " ".join(turn for document in documents for turn in document["turns"])
    found = [s for s in re.split(r"(?<=[.?!])\s+", whole) if 20 <= len(s) <= _MOST_CHARACTERS]
    rounds = itertools.count(1)
    numbered = (f"Number {i}. {text}" for i in rounds for text in dict.fromkeys(found))
    return list(itertools.islice(numbered, n))


async def speak(client: httpx.AsyncClient, text: str, arm: str, block: int) -> Row:
    body = {"input": text, "response_format": "pcm", "service_tier": ARMS[arm]}
    began_s, n_bytes, status = time.monotonic(), 0, "200"
    try:
        async with client.stream("POST", "/v1/audio/speech", json=body) as response:
            status = str(response.status_code)
            async for data in response.aiter_bytes():
                n_bytes += len(data)
    except httpx.HTTPError as error:
        status = f"{status} {type(error).__name__}"
    audio_s = n_bytes / BYTES_PER_S if status == "200" else 0.0
    return Row(
        arm=arm,
        block=block,
        status=status,
        audio_s=audio_s,
        began_s=round(began_s, 3),
        took_s=round(time.monotonic() - began_s, 3),
    )


async def run_block(url: str, lines: list[str], arm: str, block: int, n_at_once: int) -> list[Row]:
    waiting = iter(lines)
    rows: list[Row] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work() -> None:
            for text in waiting:
                rows.append(await speak(client, text, arm, block))

        await asyncio.gather(*(work() for _ in range(n_at_once)))
    return rows


def summary(rows: list[Row]) -> dict[str, Any]:
    """Of one arm."""
    audio_s, wall_s = sum(row.audio_s for row in rows), 0.0
    for block in {row.block for row in rows}:
        of_block = [row for row in rows if row.block == block]
        ended_s = max(row.began_s + row.took_s for row in of_block)
        wall_s += ended_s - min(row.began_s for row in of_block)
    took = [row.took_s for row in rows if row.status == "200"]
    return {
        "n": len(rows),
        "failed": sum(row.status != "200" for row in rows),
        "audio_s": round(audio_s, 1),
        "wall_s": round(wall_s, 1),
        "inverse_rtf": round(audio_s / wall_s, 3) if wall_s else None,
        "latency_p50_s": percentile(took, 50),
        "latency_p95_s": percentile(took, 95),
    }


def run(
    options: Options, server_args: tuple[str, ...] = (), start_timeout_s: float = _START_TIMEOUT_S
) -> tuple[list[Row], dict[str, Any]]:
    """All rows, and the summary of each arm.

    Raises:
        ServerError: the server did not start in time.
    """
    lines = texts(options.texts)
    size = -(-len(lines) // options.blocks)
    blocks = [lines[at : at + size] for at in range(0, len(lines), size)]
    rows: list[Row] = []
    with ServerProcess(
        options.model_path, options.policies, server_args, start_timeout_s
    ) as server:
        url = f"http://127.0.0.1:{server.port}"
        asyncio.run(run_block(url, lines[:2], "streaming", -1, 1))  # warms up
        for n, block in enumerate(blocks):
            for arm in sorted(ARMS, reverse=bool(n % 2)):
                rows += asyncio.run(run_block(url, block, arm, n, options.concurrency))
                found = summary([row for row in rows if (row.arm, row.block) == (arm, n)])
                print(f"block {n} {arm:10} {found}", flush=True)
    return rows, {arm: summary([row for row in rows if row.arm == arm]) for arm in ARMS}


def main() -> None:
    options = read_options(Options(), __doc__)
    rows, arms = run(options)
    for arm, found in arms.items():
        print(f"{arm:10} {found}")
    if options.json:
        document = {
            "benchmark": "speech_throughput",
            **facts(),
            "config": config_of(options),
            "arms": arms,
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
