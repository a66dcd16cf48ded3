"""Constants at full size, written as a device model (benchmark/notes/device_model.md).

The engines of thinker and talker have the published sizes and random weights (lab/random_model).
They run beside each other, as on one GPU in service, and are measured one after the other; each
batch is timed on the device (lab/recorders/batch_clock.py). The document and the device model are
written again after each part, so that a check that is cut short has those before.
"""

import asyncio
import base64
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import soundfile
import torch

from benchmark.gpu import constants
from benchmark.gpu.constants import Measured, device_model, figure, fit
from benchmark.gpu.findings import Findings
from benchmark.gpu.full_size import GRAPH_SIZES, engine_args, random_model
from benchmark.gpu.measuring import median_ms
from benchmark.gpu.places import platform_of
from benchmark.gpu.stage import running_stage
from benchmark.gpu.talker_arm import Request, speak
from benchmark.native_client import native_client
from lab.attachment import joined
from lab.random_model.attach import ENGINE_ARGS, ENVIRONMENT
from lab.random_model.folder import Facts
from lab.recorders import batch_clock
from lab.recorders.batch_clock import Batch, launch_times_s, read_batches
from sglang_live.extensions.planner.device_model.model import H200
from sglang_live.models.qwen3_omni.family import Qwen3OmniSpec
from sglang_live.stages.supervisor import Replica

_TIMEOUT_S = 100.0
_RATE_HZ = 16_000
_SOURCE = "random weights of the published sizes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Extent of the measurement.

    scale: of the model, published or tiny.
    streams: of decode rounds.
    contexts: tokens of each stream's KV in decode rounds.
    prompts: tokens of prefills.
    clips_s: seconds of audio in prefills.
    rounds: of decoding, for each number of streams and each context.
    repeats: of prefills.
    graph_sizes: streams for which rounds are captured; no more run at once.
    """

    scale: str = "published"
    streams: tuple[int, ...] = (1, 4, 8, 16, 24, 32, 48)
    contexts: tuple[int, ...] = (50, 2000)
    prompts: tuple[int, ...] = (50, 100, 200, 500, 1000, 2000)
    clips_s: tuple[int, ...] = (1, 4, 12)
    rounds: int = 24
    repeats: int = 3
    graph_sizes: tuple[int, ...] = GRAPH_SIZES
    start_timeout_s: float = 170.0


TINY = Options(
    scale="tiny",
    streams=(1, 3),
    contexts=(20, 60),
    prompts=(20, 60),
    clips_s=(1, 2),
    rounds=6,
    repeats=1,
    graph_sizes=(1, 4),
    start_timeout_s=300.0,
)


class Growing:
    """What is measured so far."""

    def __init__(self, name: str, platform: str):
        self._name = name
        self.measured: Measured = {"thinker": {}, "talker": {}, "vocoder": {}, "link": {}}
        self.figures: dict[str, Any] = {"platform": platform}
        self._began_s = time.monotonic()
        self._ended_s: dict[str, float] = {}

    def after(self, part: str) -> Findings:
        self._ended_s[part] = round(time.monotonic() - self._began_s, 1)
        values = {
            section: {name: value for name, (value, _) in found.items()}
            for section, found in self.measured.items()
        }
        figures = self.figures | {"measured": values, "parts_ended_s": dict(self._ended_s)}
        lines = [f"after {ended_s:.0f} s: {part}" for part, ended_s in self._ended_s.items()]
        lines += [
            f"{section}.{name} {value:.3g}"
            for section, found in values.items()
            for name, value in found.items()
        ]
        files = {"device_model.toml": device_model(self._name, self.measured, H200)}
        return Findings(figures, (), tuple(lines), files)


def run(options: Options, device: str, seed: int) -> Iterator[Findings]:
    place = torch.device(device)
    gpu = torch.cuda.get_device_name(place) if place.type == "cuda" else "a CPU"
    growing = Growing(f"{gpu}, full size, measured by gpu_check", platform_of(device))
    # A runner that is left ends what still runs in it: the engines of a check that is cut short.
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner() as runner:
        parts = _engine_parts(options, device, seed, Path(scratch), growing)
        while part := runner.run(_next(parts)):
            yield growing.after(part)
    # After the engines: what they leave of the GPU is little.
    sizes = constants.TINY if options.scale == "tiny" else constants.Options()
    growing.measured["link"] = constants.link(place, sizes)
    growing.figures["device_gb_per_s"] = gb_per_s = _device_gb_per_s(place)
    for row in growing.figures["thinker_decode"]:
        n_bytes = read_bytes(growing.figures["thinker_sizes"], row["streams"], row["kv_tokens"])
        row["bound_ms"] = 1e-6 * n_bytes / gb_per_s
    yield growing.after("link")
    predictor = constants.predictor(place, sizes, seed)
    rounds = _decode_figures(growing.figures["talker_decode"])
    growing.measured["talker"] |= predictor | _without_predictor(rounds, predictor)
    yield growing.after("code predictor")
    growing.measured["vocoder"] = constants.vocoder(place, sizes, seed)
    yield growing.after("vocoder")


async def _next(parts: AsyncGenerator[str, None]) -> str:
    return await anext(parts, "")


async def _engine_parts(
    options: Options, device: str, seed: int, scratch: Path, growing: Growing
) -> AsyncGenerator[str, None]:
    """Measures into `growing`; yields the name of each part as it ends."""
    random = np.random.default_rng(seed)
    with random_model(options.scale) as folder:
        async with _engines(options, device, folder, scratch) as (thinker, talker):
            growing.figures["start_s"] = {"thinker": thinker.start_s, "talker": talker.start_s}
            growing.figures["free_gb"] = _free_gb(device)
            yield "start"
            model = Qwen3OmniSpec.load(folder)
            config = json.loads((folder / "config.json").read_text("utf-8"))
            growing.figures["thinker_sizes"] = _sizes(config["thinker_config"]["text_config"])
            text = Thinker(thinker.replica, model, scratch, options, random)
            async with text:
                growing.figures["thinker_prefill"] = await text.prefills()
                growing.measured["thinker"] |= _prefill_figures(growing.figures["thinker_prefill"])
                yield "thinker, prefill"
                growing.figures["thinker_decode"] = await text.rounds()
                growing.measured["thinker"] |= _decode_figures(growing.figures["thinker_decode"])
                growing.figures["thinker_greedy"] = await text.greedy_rounds()
                yield "thinker, decode rounds"
                growing.figures["thinker_audio"] = await text.clips()
                growing.measured["thinker"] |= _encoder_figure(
                    growing.figures["thinker_audio"], growing.measured["thinker"]
                )
                yield "encoder"
                voice = Talker(talker.replica, model, scratch, options, random)
                rows = await voice.rounds()
                growing.figures |= {"talker_decode": rows.decode, "talker_prefill": rows.prefill}
                growing.measured["talker"] |= _prefill_figures(rows.prefill)
                yield "talker"
                growing.figures["launch_ms"] = _launches(scratch)
                growing.figures["beside_each_other"] = await _together(text, voice, options)
                yield "beside each other"


@dataclass(frozen=True, slots=True)
class Started:
    replica: Replica
    start_s: float


@asynccontextmanager
async def _engines(
    options: Options, device: str, folder: Path, scratch: Path
) -> AsyncIterator[tuple[Started, Started]]:
    """Thinker and talker, started at the same time."""
    environment = joined(ENVIRONMENT, batch_clock.environment(scratch))
    async with AsyncExitStack() as stack:

        async def start(stage: str) -> Started:
            began_s = time.monotonic()
            args = engine_args(stage, device, options.graph_sizes) | ENGINE_ARGS
            running = running_stage(
                stage, folder, device, args, options.start_timeout_s, environment
            )
            replica = await stack.enter_async_context(running)
            return Started(replica, round(time.monotonic() - began_s, 1))

        async with asyncio.TaskGroup() as group:
            thinker, talker = (group.create_task(start(stage)) for stage in ("thinker", "talker"))
        yield thinker.result(), talker.result()


class Record:
    """The batches of an engine since the latest look."""

    def __init__(self, folder: Path, stage: str):
        self._folder = folder
        self._stage = stage
        self._n_seen = 0

    def look(self) -> list[Batch]:
        batches = read_batches(self._folder, self._stage)
        new, self._n_seen = batches[self._n_seen :], len(batches)
        return new


class Thinker:
    """Requests to the thinker's engine, and its batches."""

    def __init__(
        self,
        replica: Replica,
        model: Qwen3OmniSpec,
        folder: Path,
        options: Options,
        random: np.random.Generator,
    ):
        self._sampling = model.sampling
        self._client = native_client(replica.spec, _TIMEOUT_S)
        self._record = Record(folder, "thinker")
        self._options = options
        self._random = random

    async def __aenter__(self) -> "Thinker":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._client.__aexit__(*exc)

    async def prefills(self) -> list[dict[str, float]]:
        return await self._prefills(
            self._options.prompts, lambda n: {"input_ids": self.prompt(n)}, lambda b: b.audio_s == 0
        )

    async def clips(self) -> list[dict[str, float]]:
        def body(seconds: int) -> dict[str, Any]:
            audio = base64.b64encode(_noise_wav(self._random, seconds)).decode()
            source = f"data:audio/wav;base64,{audio}"
            return {"text": "<|audio_start|><|audio_pad|><|audio_end|>", "audio_data": [source]}

        return await self._prefills(self._options.clips_s, body, lambda b: b.audio_s > 0)

    async def rounds(self) -> list[dict[str, float]]:
        rows = []
        for context in self._options.contexts:
            for n in self._options.streams:
                prompts = [self.prompt(context) for _ in range(n)]
                await self.decode(prompts, 2)  # its prefills, whose KV the next one finds
                batches = await self.decode(prompts, _n_rounds(self._options, n))
                rows.append(_decode_row(n, batches))
        return rows

    async def greedy_rounds(self) -> dict[str, float]:
        """With most streams and least context, to tell what sampling costs."""
        n = self._options.streams[-1]
        prompts = [self.prompt(self._options.contexts[0]) for _ in range(n)]
        return _decode_row(n, await self.decode(prompts, _n_rounds(self._options, n), greedy=True))

    async def decode(
        self, prompts: list[list[int]], n_tokens: int, *, greedy: bool = False
    ) -> list[Batch]:
        """The batches of responses to all of the prompts at once."""
        bodies = [{"input_ids": prompt} for prompt in prompts]
        await self._generate(bodies, n_tokens, {"temperature": 0} if greedy else self._sampling)
        return await self._look()

    async def _look(self) -> list[Batch]:
        # The record has a batch when a later one is launched.
        await self._generate([{"input_ids": self.prompt(2)}], 2)
        return self._record.look()

    async def _prefills(
        self,
        sizes: Sequence[int],
        body: Callable[[int], dict[str, Any]],
        is_one: Callable[[Batch], bool],
    ) -> list[dict[str, float]]:
        rows = []
        for size in sizes:
            # The first of a shape may compile.
            for _ in range(1 + self._options.repeats):
                await self._generate([body(size)], 1)
            found = [b for b in await self._look() if b.n_tokens >= size and is_one(b)]
            rows.append(_prefill_row(found[1:]))
        return rows

    def prompt(self, n: int) -> list[int]:
        """Ids that no other prompt has, so that no prefix is found."""
        ids: list[int] = self._random.integers(100, 1000, n).tolist()
        return ids

    async def _generate(
        self,
        bodies: list[dict[str, Any]],
        n_tokens: int,
        sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        sampling = {**sampling, "max_new_tokens": n_tokens, "ignore_eos": True}
        calls = [
            self._client.post("/generate", json=body | {"sampling_params": sampling})
            for body in bodies
        ]
        for response in await asyncio.gather(*calls):
            _raise_for_status(response)


@dataclass(frozen=True, slots=True)
class TalkerRows:
    decode: list[dict[str, float]]
    prefill: list[dict[str, float]]


class Talker:
    """Responses of the talker's engine, and its batches."""

    def __init__(
        self,
        replica: Replica,
        model: Qwen3OmniSpec,
        folder: Path,
        options: Options,
        random: np.random.Generator,
    ):
        self._client = replica.client
        self._model = model
        self._frames_per_token = Facts.of(model.path).frames_per_token
        self._record = Record(folder, "talker")
        self._options = options
        self._random = random
        self._n = 0

    async def rounds(self) -> TalkerRows:
        decode, prefills = [], []
        for context in self._options.contexts:
            for n in self._options.streams:
                batches = await self.speak(n, context)
                decode.append(_decode_row(n, batches))
                prefills += [b for b in batches if not b.is_decode and b.n_streams == 1]
        return TalkerRows(decode, [_prefill_row([batch]) for batch in prefills])

    async def speak(self, n: int, context: int) -> list[Batch]:
        """The batches of n responses at once."""
        n_frames = _n_rounds(self._options, n)
        await asyncio.gather(*(self._speak(context, n_frames) for _ in range(n)))
        await self._speak(2, 2)  # the record has a batch when a later one is launched
        return self._record.look()

    async def _speak(self, context: int, n_frames: int) -> None:
        """A response of that length or a little more, to its end: none runs beside the next."""
        model, per_token = self._model, self._frames_per_token
        n_tokens = math.ceil(n_frames / per_token)
        words = self._random.integers(100, 1000, context + n_tokens).tolist()
        request = Request(
            user_ids=[model.im_start_id, model.user_id, *words[:context]],
            response_ids=words[context:],
            voice=model.voices[0],
            n_frames=math.floor(n_tokens * per_token),
            num_code_groups=model.num_code_groups,
        )
        self._n += 1
        await speak(self._client, request, f"measured-{self._n}")


async def _together(text: Thinker, voice: Talker, options: Options) -> dict[str, float]:
    """Rounds of both engines at once, as on one GPU in service, and alone."""
    n, context = options.streams[-1], options.contexts[0]
    prompts = [text.prompt(context) for _ in range(n)]
    n_rounds = _n_rounds(options, n)
    alone_text = _decode_row(n, await text.decode(prompts, n_rounds))
    alone_voice = _decode_row(n, await voice.speak(n, context))
    both_text, both_voice = await asyncio.gather(
        text.decode(prompts, n_rounds), voice.speak(n, context)
    )
    return {
        "streams": n,
        "thinker_alone_ms": alone_text["ms"],
        "thinker_ms": _decode_row(n, both_text)["ms"],
        "talker_alone_ms": alone_voice["ms"],
        "talker_ms": _decode_row(n, both_voice)["ms"],
    }


def _launches(folder: Path) -> dict[str, dict[str, float]]:
    """From the choice of a batch to its begin, of batches that found the device free."""
    found = {}
    for stage in ("thinker", "talker"):
        times_s = launch_times_s(read_batches(folder, stage))
        if times_s:
            ms = [1e3 * time_s for time_s in times_s]
            p90 = float(np.percentile(ms, 90))
            found[stage] = {"n": len(ms), "median": statistics.median(ms), "p90": p90}
    return found


def _n_rounds(options: Options, n_streams: int) -> int:
    """Of each stream, so that all are there in enough of them: requests come one by one."""
    return options.rounds + 2 * n_streams


def _decode_row(n: int, batches: list[Batch]) -> dict[str, float]:
    """Of the rounds of all n streams.

    Raises:
        RuntimeError: there is none.
    """
    rounds = [batch for batch in batches if batch.is_decode and batch.n_streams == n]
    if not rounds:
        sizes = sorted({batch.n_streams for batch in batches if batch.is_decode})
        raise RuntimeError(f"no round had {n} streams, but {sizes}")
    return {
        "streams": n,
        "rounds": len(rounds),
        "kv_tokens": statistics.median(batch.kv_tokens for batch in rounds),
        "ms": statistics.median(batch.ms for batch in rounds),
    }


def _prefill_row(batches: list[Batch]) -> dict[str, float]:
    """Raises RuntimeError: there are none."""
    if not batches:
        raise RuntimeError("no prefill was recorded")
    return {
        "tokens": statistics.mean(batch.n_tokens for batch in batches),
        "audio_s": statistics.mean(batch.audio_s for batch in batches),
        "ms": statistics.median(batch.ms for batch in batches),
    }


def _decode_figures(rows: list[dict[str, float]]) -> dict[str, tuple[float, str]]:
    found = fit([[row["streams"], row["kv_tokens"]] for row in rows], [row["ms"] for row in rows])
    fixed, per_stream, per_kv = found
    source = f"decode rounds of {_SOURCE}"
    return {
        "decode_fixed_ms": figure(fixed, source),
        "decode_per_stream_ms": figure(per_stream, source),
        "decode_per_kv_token_ns": figure(1e6 * per_kv, source),
    }


def _prefill_figures(rows: list[dict[str, float]]) -> dict[str, tuple[float, str]]:
    fixed, per_token = fit([[row["tokens"]] for row in rows], [row["ms"] for row in rows])
    source = f"prefills of {_SOURCE}"
    return {
        "prefill_fixed_ms": figure(fixed, source),
        "prefill_per_token_us": figure(1e3 * per_token, source),
    }


def _encoder_figure(
    rows: list[dict[str, float]], prefill: dict[str, tuple[float, str]]
) -> dict[str, tuple[float, str]]:
    """What a second of audio adds to a prefill of as many tokens."""
    fixed_ms, per_token_us = prefill["prefill_fixed_ms"][0], prefill["prefill_per_token_us"][0]
    more_ms = [row["ms"] - fixed_ms - row["tokens"] * per_token_us / 1e3 for row in rows]
    _, per_s = fit([[row["audio_s"]] for row in rows], more_ms)
    return {"encoder_per_audio_s_ms": figure(per_s, f"clips of noise, {_SOURCE}")}


def _without_predictor(
    rounds: dict[str, tuple[float, str]], predictor: dict[str, tuple[float, str]]
) -> dict[str, tuple[float, str]]:
    """The engine's rounds have the code predictor in them; a device model names it apart."""
    source = f"rounds of {_SOURCE}, less the code predictor's"
    return rounds | {
        f"decode_{cost}_ms": figure(
            rounds[f"decode_{cost}_ms"][0] - predictor[f"code_predictor_{cost}_ms"][0], source
        )
        for cost in ("fixed", "per_stream")
    }


def _sizes(text: dict[str, Any]) -> dict[str, int]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    of_kv_and_experts = "num_key_value_heads", "num_experts", "num_experts_per_tok"
    return {name: text[name] for name in (*names, *of_kv_and_experts, "moe_intermediate_size")}


def read_bytes(sizes: Mapping[str, int], n_streams: float, kv_tokens: float) -> float:
    """What a decode round in bf16 reads at least: weights, of experts those that are chosen if
    they are drawn, and KV."""
    hidden, heads, n_kv = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    n_experts, chosen = sizes["num_experts"], sizes["num_experts_per_tok"]
    attention = hidden * sizes["head_dim"] * 2 * (heads + n_kv)
    expert = 3 * hidden * sizes["moe_intermediate_size"]
    n_read = n_experts * (1 - (1 - chosen / n_experts) ** n_streams)
    layer = attention + n_experts * hidden + n_read * expert
    kv = 2 * n_kv * sizes["head_dim"] * kv_tokens
    head = sizes["vocab_size"] * hidden
    return 2 * (sizes["num_hidden_layers"] * (layer + kv) + head)


def _free_gb(device: str) -> float | None:
    """What the engines leave of the GPU; None: there is none."""
    return None if device == "cpu" else round(torch.cuda.mem_get_info(device)[0] / 1e9, 1)


def _device_gb_per_s(place: torch.device) -> float:
    """What a copy in the device's memory reads and writes, the bound of a decode round."""
    n_bytes = 1 << (30 if place.type == "cuda" else 24)
    here, there = (torch.empty(n_bytes, dtype=torch.uint8, device=place) for _ in range(2))
    ms = median_ms(lambda: there.copy_(here), place, repeats=5)
    return 2e-6 * n_bytes / ms


def _noise_wav(random: np.random.Generator, seconds: int) -> bytes:
    sound = io.BytesIO()
    samples = (3000 * random.standard_normal(seconds * _RATE_HZ)).astype(np.int16)
    soundfile.write(sound, samples, _RATE_HZ, format="WAV")
    return sound.getvalue()


def _raise_for_status(response: httpx.Response) -> None:
    if response.is_error:
        raise RuntimeError(f"the thinker: {response.status_code} {response.text[:200]}")
