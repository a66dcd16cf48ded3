"""Measured constants, written as a device model (benchmark/notes/device_model.md).

The code predictor, the vocoder and the link are measured at the published sizes, the engines with
the demo architecture: their figures are what the machinery around a small model costs. A figure
that is not measured is the one of H100, as an estimate.
"""

import asyncio
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from scipy.optimize import nnls

from benchmark.gpu import code2wav, code_predictor, talker
from benchmark.gpu.arms import arms_on
from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import median_ms
from benchmark.gpu.places import platform_of
from benchmark.gpu.stage import running_stage
from benchmark.gpu.talker_arm import run_arm
from benchmark.native_client import native_client
from sglang_live.extensions.planner.device_model.model import H100
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav
from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec

_TIMEOUT_S = 100.0
# What a fit finds below this is below its resolution; a device model has positive figures only.
LEAST = 1e-3
_HOST_BYTES = (1 << 16, 1 << 26)
Measured = dict[str, dict[str, tuple[float, str]]]  # section -> figure -> value, source


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Extent of the measurement.

    batches: numbers of concurrent responses.
    prompts: tokens of a short and of a long prompt.
    tokens: of a short and of a long response; their difference is decoded.
    published_sizes: 0: toy sizes of code predictor and vocoder.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompts: tuple[int, ...] = (50, 2000)
    tokens: tuple[int, ...] = (8, 40)
    frames: int = 24
    repeats: int = 5
    published_sizes: int = 1
    start_timeout_s: float = 100.0


TINY = Options(
    batches=(1, 2), prompts=(10, 200), tokens=(2, 6), frames=6, repeats=1, published_sizes=0
)


@dataclass(frozen=True, slots=True)
class Engines:
    """thinker_decode: what the thinker's costs of decoding are fitted to."""

    thinker: dict[str, tuple[float, str]]
    talker: dict[str, tuple[float, str]]
    thinker_decode: list[dict[str, float]]


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    place = torch.device(device)
    measured: Measured = {
        "link": link(place, options),
        "vocoder": vocoder(place, options, seed),
        "talker": predictor(place, options, seed),
    }
    with tempfile.TemporaryDirectory() as scratch:
        engines = asyncio.run(_engines(options, device, seed, Path(scratch)))
    measured["thinker"] = engines.thinker
    measured["talker"] |= engines.talker
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "a CPU"
    text = device_model(f"{name}, measured by gpu_check", measured)
    values = {
        section: {figure: value for figure, (value, _) in found.items()}
        for section, found in measured.items()
    }
    figures = {
        "platform": platform,
        "measured": values,
        "thinker_decode": engines.thinker_decode,
    }
    lines = tuple(
        f"{section}.{figure} {value:.3g}"
        for section, found in values.items()
        for figure, value in found.items()
    )
    return Findings(figures, (), lines, {"device_model.toml": text})


def fit(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Least squares of costs, which are not negative: a constant, then one for each column."""
    matrix = np.array([[1.0, *row] for row in rows])
    # Columns of equal size: a KV token costs a millionth of what a stream does.
    sizes = np.abs(matrix).max(axis=0)
    found, _ = nnls(matrix / sizes, np.array(times))
    return [float(value) for value in found / sizes]


def figure(value: float, source: str) -> tuple[float, str]:
    if value >= LEAST:
        return value, f"measured: {source}"
    return LEAST, f"estimate: below the resolution of {source}"


def link(place: torch.device, options: Options) -> dict[str, tuple[float, str]]:
    found = {}
    for direction in ("to_device", "to_host"):
        times_ms = []
        for n_bytes in _HOST_BYTES:
            host = torch.ones(n_bytes, dtype=torch.uint8, pin_memory=place.type == "cuda")
            there = torch.ones(n_bytes, dtype=torch.uint8, device=place)
            to, from_ = (there, host) if direction == "to_device" else (host, there)

            def copy(to: torch.Tensor = to, from_: torch.Tensor = from_) -> torch.Tensor:
                return to.copy_(from_, non_blocking=True)

            times_ms.append(median_ms(copy, place, options.repeats))
        latency_ms, ms_per_byte = fit([[n] for n in _HOST_BYTES], times_ms)
        source = "pinned copies of 64 KiB and 64 MiB"
        found[f"{direction}_gb_per_s"] = figure(1e-6 / max(ms_per_byte, 1e-12), source)
        found[f"{direction}_latency_us"] = figure(1e3 * latency_ms, source)
    return found


def vocoder(place: torch.device, options: Options, seed: int) -> dict[str, tuple[float, str]]:
    sizes = code2wav.Options() if options.published_sizes else code2wav.TINY
    sizes = replace(sizes, batches=options.batches, chunks=(4,), repeats=options.repeats)
    decoder = StreamingCode2Wav(code2wav.build(sizes, seed), device=place, dtype=torch.float32)
    code2wav.use_graphs(decoder, place, max(sizes.batches))
    rows = code2wav.measure(decoder, "float32_graphs", sizes)
    fixed, per_chunk = fit([[row["batch"]] for row in rows], [row["ms_per_chunk"] for row in rows])
    source = "chunks of 4 frames in float32, with graphs"
    return {"fixed_ms": figure(fixed, source), "per_chunk_ms": figure(per_chunk, source)}


def predictor(place: torch.device, options: Options, seed: int) -> dict[str, tuple[float, str]]:
    sizes = code_predictor.Options() if options.published_sizes else code_predictor.TINY
    sizes = replace(sizes, batches=options.batches, repeats=options.repeats)
    model = code_predictor.build(sizes, seed)
    with torch.inference_mode():
        placed = code_predictor._placed(model, place, torch.bfloat16)
        rows = code_predictor.measure(placed, sizes, place)
    rows = [row for row in rows if row["mode"] == "sampled"]
    times = [row["eager_ms"] if row["graph_ms"] is None else row["graph_ms"] for row in rows]
    fixed, per_stream = fit([[row["batch"]] for row in rows], times)
    source = "sampled frames in bf16, in a graph" if place.type == "cuda" else "sampled frames"
    return {
        "code_predictor_fixed_ms": figure(fixed, source),
        "code_predictor_per_stream_ms": figure(per_stream, source),
    }


async def _engines(options: Options, device: str, seed: int, scratch: Path) -> Engines:
    checkpoint = scratch / "model"
    checkpoint.mkdir()
    build(checkpoint, DemoSize(thinker_end_logit=0.0, talker_end_logit=0.0))
    arms = arms_on(device)
    place, args = arms.get("bfloat16", arms["cpu"])
    args = args | {"max_total_tokens": 2 * max(options.batches) * max(options.prompts) + 16_384}
    stage = running_stage("thinker", checkpoint, place, args, options.start_timeout_s)
    async with stage as replica, native_client(replica.spec, _TIMEOUT_S) as client:
        thinker, thinker_decode = await _thinker(client, options, np.random.default_rng(seed))
    sizes = talker.Options(frames=options.frames, batches=options.batches)
    request = talker._request(Qwen3OmniSpec.load(checkpoint), sizes, seed)
    arm = await run_arm(checkpoint, place, args, request, options.batches, options.start_timeout_s)
    fixed, per_stream = fit([[n] for n in arm.ms_per_frame], list(arm.ms_per_frame.values()))
    source = "frames of the demo architecture, with its own code predictor"
    decode = {
        "decode_fixed_ms": figure(fixed, source),
        "decode_per_stream_ms": figure(per_stream, source),
    }
    return Engines(thinker, decode, thinker_decode)


async def _thinker(
    client: httpx.AsyncClient, options: Options, random: np.random.Generator
) -> tuple[dict[str, tuple[float, str]], list[dict[str, float]]]:
    few, many = options.tokens
    repeats = range(options.repeats)
    rows, times = [], []
    for n in options.batches:
        for prompt in options.prompts:
            await _generate_ms(client, n, prompt, few, random)  # the first of a shape compiles
            short, long = [
                min([await _generate_ms(client, n, prompt, t, random) for _ in repeats])
                for t in (few, many)
            ]
            rows.append([n, n * (prompt + (few + many) / 2)])
            times.append((long - short) / (many - few))
    fixed, per_stream, per_kv = fit(rows, times)
    prefills = [
        min([await _generate_ms(client, 1, prompt, 1, random) for _ in repeats])
        for prompt in options.prompts
    ]
    prefill, per_token = fit([[prompt] for prompt in options.prompts], prefills)
    decoded, prefilled = "tokens of the demo architecture", "prompts of the demo architecture"
    figures = {
        "decode_fixed_ms": figure(fixed, decoded),
        "decode_per_stream_ms": figure(per_stream, decoded),
        "decode_per_kv_token_ns": figure(1e6 * per_kv, decoded),
        "prefill_fixed_ms": figure(prefill, prefilled),
        "prefill_per_token_us": figure(1e3 * per_token, prefilled),
    }
    return figures, [
        {"streams": n, "kv_tokens": kv_tokens, "ms_per_token": ms}
        for (n, kv_tokens), ms in zip(rows, times, strict=True)
    ]


async def _generate_ms(
    client: httpx.AsyncClient, n: int, prompt: int, n_tokens: int, random: np.random.Generator
) -> float:
    """Time of n responses together. Prompts are new, so that no prefix of theirs is cached."""
    sampling = {"temperature": 0, "max_new_tokens": n_tokens, "ignore_eos": True}
    bodies = [
        {"input_ids": random.integers(100, 1000, prompt).tolist(), "sampling_params": sampling}
        for _ in range(n)
    ]
    began_s = time.perf_counter()
    for response in await asyncio.gather(*(client.post("/generate", json=b) for b in bodies)):
        response.raise_for_status()
    return 1e3 * (time.perf_counter() - began_s)


def device_model(name: str, measured: Measured, like: Path = H100) -> str:
    """The text of a device model of one device: that of `like` with the measured figures."""
    base: dict[str, Any] = tomllib.loads(like.read_text("utf-8"))
    lines = [f'name = "{name}"', "n_devices = 1"]
    for section in ("thinker", "talker", "vocoder", "link"):
        lines += ["", f"[{section}]"]
        for key, entry in base[section].items():
            there = entry["value"], f"estimate: not measured, as of {base['name']}"
            value, source = measured[section].get(key, there)
            lines.append(f'{key} = {{ value = {value:.6g}, source = "{source}" }}')
    return "\n".join(lines) + "\n"
