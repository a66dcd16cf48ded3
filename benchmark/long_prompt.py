"""Delay that a long prompt's prefill causes to short questions, and its own duration.

    python -m benchmark.long_prompt --policies off,all --words 8000,20000 --json out.json

One server per arm. A short question is repeated: alone, and while a new prompt of --words words is
prefilled. For both, the time to the first sound is measured in sessions over /v1/realtime, or the
time to the first token in written chat. Arms are interleaved.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from lab.load_client.options import LoadOptions
from sglang_live.client.connection import open_socket

START_TIMEOUT_S = 300.0
# Words of the demo model's tokenizer: 1.2 tokens each.
CORPUS = Path(__file__).parents[1] / "python/sglang_live/models/demo/corpus.txt"
LONG_TIMEOUT_S = 900.0
_count = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One flag per field.

    long, short: "realtime" or "written", comma-separated; long and short of one place are a pair.
    asks: number of short questions alone.
    most_asks: highest number of short questions beside the long prompt.
    lead_s: time from the long prompt to the first question beside it.
    pause_s: longest random pause before a question, which so comes at any moment of a slice.
    tokens: length of a response.
    """

    policies: str = "off,all"
    words: str = "8000,20000"
    long: str = "realtime,written"
    short: str = "realtime,written"
    asks: int = 8
    repeats: int = 3
    most_asks: int = 60
    lead_s: float = 0.5
    pause_s: float = 0.3
    tokens: int = 16
    model_path: str = "demo-random"
    server_arg: str = ""
    seed: int = 1
    json: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Times since the question, in seconds; None if there was no such event."""

    first_s: float | None
    done_s: float
    status: str
    error: str = ""


class Realtime:
    """A realtime session with typed questions and spoken responses."""

    def __init__(self, server: ServerProcess, model: str, tokens: int):
        self._options = LoadOptions(url=server.url, model=model)
        self._tokens = tokens

    async def __aenter__(self) -> "Realtime":
        self._socket = await open_socket(self._options)
        return self

    async def __aexit__(self, *exc) -> None:
        await self._socket.close()

    async def ask(self, text: str) -> Answer:
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        response = {"max_output_tokens": self._tokens}
        began_s, first_s = time.monotonic(), None
        for event in (
            {"type": "conversation.item.create", "item": item},
            {"type": "response.create", "response": response},
        ):
            await self._socket.send(json.dumps(event))
        async for answer in self._events():
            if answer["type"] == "response.output_audio.delta" and first_s is None:
                first_s = time.monotonic() - began_s
            elif answer["type"] == "error":
                return Answer(None, time.monotonic() - began_s, "error", answer["error"]["message"])
            elif answer["type"] == "response.done":
                told = answer["response"]
                error = (told.get("status_details") or {}).get("error") or {}
                # A response that ends at its token limit is complete here.
                status = "completed" if told["status"] == "incomplete" else told["status"]
                done_s = time.monotonic() - began_s
                return Answer(first_s, done_s, status, str(error.get("message", "")))
        raise AssertionError("the socket was closed")

    async def _events(self) -> AsyncIterator[dict]:
        async for message in self._socket:
            yield json.loads(message)


class Written:
    """Chat without audio."""

    def __init__(self, server: ServerProcess, model: str, tokens: int):
        self._url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        self._model, self._tokens = model, tokens

    async def __aenter__(self) -> "Written":
        self._client = httpx.AsyncClient(timeout=LONG_TIMEOUT_S, trust_env=False)
        return self

    async def __aexit__(self, *exc) -> None:
        await self._client.aclose()

    async def ask(self, text: str) -> Answer:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": self._tokens,
            "temperature": 0,
        }
        began_s, first_s, status, error = time.monotonic(), None, "completed", ""
        async with self._client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                status, error = str(answer.status_code), (await answer.aread()).decode()[:300]
            async for line in answer.aiter_lines():
                if '"content":"' in line.replace(": ", ":") and first_s is None:
                    first_s = time.monotonic() - began_s
                if '"error"' in line:
                    status, error = "failed", line[:300]
        return Answer(first_s, time.monotonic() - began_s, status, error)


Client = Realtime | Written
KINDS: dict[str, Callable[[ServerProcess, str, int], Client]] = {
    "realtime": Realtime,
    "written": Written,
}


def long_text(n_words: int, seed: int) -> str:
    words = CORPUS.read_text("utf-8").split()
    return " ".join(random.Random(f"{seed}-{next(_count)}").choices(words, k=n_words))


def short_text() -> str:
    return f"what is the number {next(_count)}"


async def measure(server: ServerProcess, options: Options, n_words: int, pair: tuple) -> dict:
    """Short questions alone, the long prompt alone, then both."""
    model = Path(options.model_path).name
    long_kind, short_kind = pair
    async with KINDS[short_kind](server, model, options.tokens) as short:
        alone = []
        for _ in range(options.asks):
            await asyncio.sleep(random.uniform(0.0, options.pause_s))
            alone.append(await short.ask(short_text()))
        async with KINDS[long_kind](server, model, options.tokens) as session:
            long_alone = await session.ask(long_text(n_words, options.seed))
        async with KINDS[long_kind](server, model, options.tokens) as session:
            asking = asyncio.create_task(session.ask(long_text(n_words, options.seed)))
            await asyncio.sleep(options.lead_s)
            beside = []
            while not asking.done() and len(beside) < options.most_asks:
                await asyncio.sleep(random.uniform(0.0, options.pause_s))
                beside.append(await short.ask(short_text()))
            long_beside = await asking
    return {
        "words": n_words,
        "long": long_kind,
        "short": short_kind,
        "alone_ms": [_ms(answer.first_s) for answer in alone],
        # The prefill may have ended before the last question.
        "beside_ms": [_ms(answer.first_s) for answer in beside[:-1] or beside],
        "short_errors": [a.error or a.status for a in beside if a.status != "completed"],
        "long_alone": _times_ms(long_alone),
        "long_beside": _times_ms(long_beside),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _times_ms(answer: Answer) -> dict:
    first_ms, done_ms = _ms(answer.first_s), _ms(answer.done_s)
    return {
        "first_ms": first_ms,
        "done_ms": done_ms,
        "status": answer.status,
        "error": answer.error,
    }


def run(options: Options) -> list[dict]:
    pairs = list(zip(options.long.split(","), options.short.split(","), strict=True))
    rows = []
    args = tuple(options.server_arg.split()) if options.server_arg else ()
    for repeat in range(options.repeats):
        for policies in options.policies.split(","):
            with ServerProcess(options.model_path, policies, args, START_TIMEOUT_S) as server:
                for pair in pairs:
                    asyncio.run(_warm_up(server, options, pair))
                    for words in map(int, options.words.split(",")):
                        row = asyncio.run(measure(server, options, words, pair))
                        rows.append({"policies": policies, "repeat": repeat, **row})
                        print(_line(rows[-1]), flush=True)
    return rows


async def _warm_up(server: ServerProcess, options: Options, pair: tuple) -> None:
    for kind in pair:
        async with KINDS[kind](server, Path(options.model_path).name, options.tokens) as session:
            await session.ask(short_text())


def _p50(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _line(row: dict) -> str:
    alone, beside, long = _p50(row["alone_ms"]), _p50(row["beside_ms"]), row["long_beside"]
    ratio = f"{beside / alone:.2f}x" if alone and beside else "n/a"
    return (
        f"{row['policies']:>5} {row['words']:6d} words {row['long']:>8}, short {row['short']:>8}: "
        f"first {alone:.0f} ms alone, {beside or float('nan'):.0f} beside ({ratio}, "
        f"n={len(row['beside_ms'])}, failed {len(row['short_errors'])}); "
        f"long {row['long_alone']['first_ms']} -> {long['first_ms']} ms, {long['status']}"
    )


def summary(rows: list[dict]) -> list[dict]:
    """One line per arm and point, over all repeats."""
    found = []
    places = dict.fromkeys((r["policies"], r["words"], r["long"], r["short"]) for r in rows)
    for policies, words, long, short in places:
        own = [
            r
            for r in rows
            if (r["policies"], r["words"], r["long"], r["short"]) == (policies, words, long, short)
        ]
        alone = [value for r in own for value in r["alone_ms"]]
        beside = [value for r in own for value in r["beside_ms"]]
        p50_alone, p50_beside = _p50(alone), _p50(beside)
        found.append(
            {
                "policies": policies,
                "words": words,
                "long": long,
                "short": short,
                "alone_ms_p50": p50_alone,
                "beside_ms_p50": p50_beside,
                "beside_ms_max": max((v for v in beside if v is not None), default=None),
                "ratio": p50_beside / p50_alone if p50_alone and p50_beside else None,
                "n_alone": len(alone),
                "n_beside": len(beside),
                "short_failed": sum(len(r["short_errors"]) for r in own),
                "long_alone_ms_p50": _p50([r["long_alone"]["first_ms"] for r in own]),
                "long_beside_ms_p50": _p50([r["long_beside"]["first_ms"] for r in own]),
                "long_completed": sum(r["long_beside"]["status"] == "completed" for r in own),
                "n_long": len(own),
            }
        )
    return found


def main() -> None:
    options = read_options(Options(), __doc__)
    rows = run(options)
    if options.json:
        document = {
            "benchmark": "long_prompt",
            **facts(),
            "config": config_of(options),
            "summary": summary(rows),
            "rows": rows,
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
