"""The thinker in its SGLang engine: greedy tokens on the device against the CPU, and their pace.

The demo architecture, with responses that never end by themselves. In bf16 also with decode
graphs against eager. Sound is part of the check of the whole server.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmark.gpu.arms import arms_on, compare, lines_of
from benchmark.gpu.findings import Findings
from benchmark.gpu.places import platform_of
from benchmark.gpu.stage import running_stage
from benchmark.native_client import native_client
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Extent of the check.

    tokens: tokens compared.
    batches: numbers of concurrent responses for the pace.
    prefills: measured one by one, from the request to its first token.
    """

    tokens: int = 32
    prompt_tokens: int = 40
    batches: tuple[int, ...] = (1, 8)
    prefills: int = 20
    start_timeout_s: float = 100.0


TINY = Options(tokens=8, batches=(2,), prefills=2)


@dataclass(frozen=True, slots=True)
class Arm:
    """
    tokens: [n_tokens] of one response.
    ms_per_token: by number of concurrent responses.
    prefill_ms: median from a request to its only token.
    """

    tokens: np.ndarray
    ms_per_token: dict[int, float]
    prefill_ms: float


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    with tempfile.TemporaryDirectory() as scratch:
        arms = asyncio.run(_run_arms(options, device, seed, Path(scratch)))
    figures, problems = compare({name: arm.tokens for name, arm in arms.items()}, "tokens")
    figures |= {
        "platform": platform,
        "ms_per_token": {name: arm.ms_per_token for name, arm in arms.items() if name != "cpu"},
        "prefill_ms": {name: arm.prefill_ms for name, arm in arms.items() if name != "cpu"},
    }
    lines = lines_of(figures, "tokens")
    for name, pace in figures["ms_per_token"].items():
        lines += [f"{name}, {n} responses: {ms:.2f} ms per token" for n, ms in pace.items()]
        lines.append(f"{name}: {figures['prefill_ms'][name]:.2f} ms for a prefill")
    return Findings(figures, tuple(problems), tuple(lines))


async def _run_arms(options: Options, device: str, seed: int, scratch: Path) -> dict[str, Arm]:
    checkpoint = scratch / "model"
    checkpoint.mkdir()
    build(checkpoint, DemoSize(thinker_end_logit=0.0))
    prompt = np.random.default_rng(seed).integers(100, 1000, options.prompt_tokens).tolist()
    return {
        name: await _run_arm(options, prompt, checkpoint, place, args)
        for name, (place, args) in arms_on(device).items()
    }


async def _run_arm(
    options: Options, prompt: list[int], checkpoint: Path, device: str, args: dict[str, Any]
) -> Arm:
    stage = running_stage("thinker", checkpoint, device, args, options.start_timeout_s)
    async with stage as replica, native_client(replica.spec, _TIMEOUT_S) as client:
        tokens, _ = await _generate(client, prompt, options.tokens)
        ms_per_token = {}
        for n in options.batches:
            # Prompts of their own: a prefix that is cached would be no prefill.
            calls = [_generate(client, [i + 10, *prompt], options.tokens) for i in range(n)]
            ms_per_token[n] = float(np.median([ms for _, ms in await asyncio.gather(*calls)]))
        prompts = ([i + 500, *prompt] for i in range(options.prefills))
        prefills_ms = [(await _generate(client, one, 1))[1] for one in prompts]
    return Arm(np.array(tokens), ms_per_token, float(np.median(prefills_ms)))


async def _generate(
    client: httpx.AsyncClient, prompt: list[int], n_tokens: int
) -> tuple[list[int], float]:
    """Tokens, and ms per token with the prefill."""
    began_s = time.perf_counter()
    sampling = {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True}
    response = await client.post(
        "/generate", json={"input_ids": prompt, "sampling_params": sampling}
    )
    response.raise_for_status()
    ms = 1e3 * (time.perf_counter() - began_s)
    return response.json()["output_ids"], ms / n_tokens
