"""Servers whose KV pools exchange memory, under load: what it costs the giver, and when it moves.

Lender: speech of the talker while the thinker answers prompts, each longer than those before, so
that memory leaves the talker's pool for each; against a server with pools of a fixed size, whose
thinker has room for all prompts. Follow: the sizes of both pools through phases with long prompts
and phases without.
"""

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from benchmark.load.server import ServerProcess
from benchmark.speech_throughput import BYTES_PER_S, texts
from sglang_live.extensions.planner.simulation.load.stats import percentile

_TIMEOUT_S = 600.0
_FRAMES_PER_S = 12.5
_PROMPT_STEP_TOKENS = 256
_METRIC = re.compile(r'^sglang_live_kv_mover\{what="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Attributes:
        speeches: of the talker, one after the other, in each run.
        longest_tokens: of the prompts.
        prompt_every_s: from the end of a prompt to the next.
        seed: of the prompts' tokens.
    """

    speeches: int
    longest_tokens: int
    prompt_every_s: float
    seed: int


def lengths(load: Load) -> Iterator[int]:
    """Longer from prompt to prompt, and then from the shortest on."""
    rising = range(_PROMPT_STEP_TOKENS, load.longest_tokens + 1, _PROMPT_STEP_TOKENS)
    return itertools.cycle(rising)


def moves(server: ServerProcess) -> dict[str, float]:
    """What the mover counts; empty without one."""
    return {name: float(value) for name, value in _METRIC.findall(server.metrics())}


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    url = f"http://127.0.0.1:{server.port}"
    return httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)


async def ask(client: httpx.AsyncClient, rng: random.Random, n_tokens: int) -> float:
    """Seconds to the answer of a prompt.

    Raises:
        RuntimeError: it was refused.
    """
    body = {
        "input_ids": [rng.randrange(10, 200) for _ in range(n_tokens)],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
    }
    began_s = time.monotonic()
    answer = await client.post("/generate", json=body)
    if answer.status_code != 200:
        raise RuntimeError(answer.text)
    return time.monotonic() - began_s


async def speak(client: httpx.AsyncClient, text: str) -> tuple[float, float, float]:
    """Seconds to the first audio, seconds to the end, and seconds of audio."""
    body = {"input": text, "response_format": "pcm", "service_tier": "auto"}
    began_s, first_s, n_bytes = time.monotonic(), 0.0, 0
    async with client.stream("POST", "/v1/audio/speech", json=body) as response:
        response.raise_for_status()
        async for data in response.aiter_bytes():
            first_s = first_s or time.monotonic() - began_s
            n_bytes += len(data)
    return first_s, time.monotonic() - began_s, n_bytes / BYTES_PER_S


async def lender(server: ServerProcess, load: Load, *, prompts: bool) -> dict:
    """One run: the talker's speech while the thinker answers prompts."""
    rng, spent_s = random.Random(load.seed), []
    async with client_of(server) as client:

        async def think() -> None:
            for n_tokens in lengths(load):
                spent_s.append(await ask(client, rng, n_tokens))
                await asyncio.sleep(load.prompt_every_s)

        for text in texts(2):  # warms up
            await speak(client, text)
        before = moves(server)
        thinking = asyncio.create_task(think()) if prompts else None
        spoken = [await speak(client, text) for text in texts(load.speeches)]
        if thinking is not None:
            if thinking.done():
                thinking.result()  # a refusal
            thinking.cancel()
    after = moves(server)
    first, whole, audio = zip(*spoken, strict=True)
    return {
        "first_audio_s_p50": percentile(list(first), 50),
        "first_audio_s_p90": percentile(list(first), 90),
        "frames_per_s": _FRAMES_PER_S * sum(audio) / sum(whole),
        "prompts": len(spent_s),
        "prompt_s_p50": percentile(spent_s, 50) if spent_s else None,
        "moved": {name: after[name] - before.get(name, 0.0) for name in after},
    }


async def follow(server: ServerProcess, load: Load, phases_s: list[float]) -> list[dict]:
    """Phases with long prompts (the first, the third and so on) and without, with the mover's
    counts of each."""
    rng, found = random.Random(load.seed), []
    async with client_of(server) as client:
        for at, phase_s in enumerate(phases_s):
            before, began_s, n_prompts = Counter(moves(server)), time.monotonic(), 0
            while time.monotonic() < began_s + phase_s:
                if at % 2 == 0:
                    await ask(client, rng, rng.randrange(load.longest_tokens // 2) + 256)
                    n_prompts += 1
                await asyncio.sleep(load.prompt_every_s)
            after = Counter(moves(server))
            sizes = {name: after.pop(name) for name in list(after) if name.endswith("_granules")}
            counted = {name: value - before[name] for name, value in after.items()}
            found.append({"phase_s": phase_s, "prompts": n_prompts, **sizes, **counted})
    return found
