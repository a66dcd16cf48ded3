"""KV pools of two engines on one GPU that exchange memory while they serve.

Three parts: what a move costs (benchmark.elastic); whether memory that has moved is empty and the
rest is whole; and prompts that are longer than the pool which the thinker starts with, whose
answers are compared with those of an engine with a larger pool.
"""

import asyncio
import random
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmark import elastic
from benchmark.gpu.findings import Findings
from benchmark.gpu.lending import EXACT
from benchmark.gpu.measuring import synchronize
from benchmark.gpu.places import gpus_hidden, indexed, platform_of
from benchmark.lending.stages import Pair, running_pair
from benchmark.native_client import native_client
from sglang_live.extensions.elastic.engine.buffers import store_of
from sglang_live.extensions.elastic.engine.elastic_memory import ElasticMemory, Geometry

_POLICIES = ("urgency", "retention", "next-use")
_REQUEST_TIMEOUT_S = 120.0
_NEW_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    tokens: sizes of the pools of the first part.
    layers: of their model.
    moves: of each size.
    row_bytes: of one token in one of the buffers of the second part; 1,024 in Qwen3-Omni's thinker.
    thinker_tokens, talker_tokens: sizes at start of the third part.
    prompt_tokens: of each of its prompts.
    prompts: that run at the same time.
    """

    tokens: str = "65536,262144,1048576"
    layers: int = 4
    moves: int = 60
    row_bytes: int = 1024
    thinker_tokens: int = 16_384
    talker_tokens: int = 163_840
    prompt_tokens: int = 20_000
    prompts: int = 4


TINY = Options(
    tokens="4096",
    moves=8,
    row_bytes=128,
    thinker_tokens=1024,
    talker_tokens=16_384,
    prompt_tokens=2000,
    prompts=2,
)


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    place = torch.device(indexed(device))
    sizes = elastic.Options(layers=options.layers, moves=options.moves, device=indexed(device))
    resize = []
    for tokens in map(int, options.tokens.split(",")):
        resize.append(elastic.measure_resize(tokens, 1, sizes))
        print("resize", elastic.rounded(resize[-1]), flush=True)
    problems = exchange(options, place)
    with gpus_hidden(device == "cpu"):
        served = asyncio.run(_serve(options, device, seed))
    print("served", {name: served[name] for name in ("moves", "tokens")}, flush=True)
    problems += judge(served, options)
    figures = {"platform": platform, "resize": resize, "served": served}
    return Findings(figures, tuple(problems), ())


def exchange(options: Options, place: torch.device) -> list[str]:
    """Two pools of this process hand all but one unit to each other."""
    problems = []
    with (
        closing(_Buffers(options, place, 1.0)) as one,
        closing(_Buffers(options, place, 2.0)) as two,
    ):
        for giver, receiver in ((one, two), (two, one)):
            kept = receiver.memory.units
            unit = giver.memory.geometry.granules
            moved = min(4 * unit, (giver.memory.units - 1) * unit)
            passed = giver.memory.release(moved)
            receiver.memory.receive(passed.runs, list(passed.files))
            synchronize(place)
            problems += giver.problems(giver.memory.units)
            problems += receiver.problems(kept)
            receiver.write()
            problems += receiver.problems(receiver.memory.units)
    return problems


class _Buffers:
    """Memory of eight buffers, with one value in all rows."""

    def __init__(self, options: Options, place: torch.device, value: float):
        store = store_of(place)
        geometry = Geometry((options.row_bytes,) * 8, 1, store.granule_bytes)
        rows = 64 * geometry.unit_rows
        self.memory = ElasticMemory(store, geometry, rows, 8 * geometry.granules)
        shape = (rows, options.row_bytes // 4)
        self._tensors = [self.memory.tensor(at, shape, torch.float32) for at in range(8)]
        self._value = value
        self.write()

    def write(self) -> None:
        for tensor in self._tensors:
            tensor[: self._rows(self.memory.units)] = self._value

    def problems(self, units: int) -> list[str]:
        """Rows of these units have the value, and those behind them are zero."""
        n, end = self._rows(units), self._rows(self.memory.units)
        found = []
        if not all(bool((tensor[:n] == self._value).all()) for tensor in self._tensors):
            found.append("rows of a pool have changed while its memory moved")
        if any(bool(tensor[n:end].any()) for tensor in self._tensors):
            found.append("memory arrives with what its giver had in it")
        return found

    def close(self) -> None:
        self._tensors = []
        self.memory.close()

    def _rows(self, units: int) -> int:
        return units * self.memory.geometry.unit_rows


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    error: str


async def _serve(options: Options, device: str, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(10, 200) for _ in range(options.prompt_tokens)]
        for _ in range(options.prompts)
    ]
    room = 2 * options.prompts * options.prompt_tokens
    fixed, _ = await _answers(replace(options, thinker_tokens=room), device, prompts, False)
    answers, counts = await _answers(options, device, prompts, True)
    return {
        "tokens": counts.get("thinker_tokens", 0.0),
        "moves": counts,
        "answers": [asdict(answer) for answer in answers],
        "fixed": [asdict(answer) for answer in fixed],
    }


async def _answers(
    options: Options, device: str, prompts: list[list[int]], is_elastic: bool
) -> tuple[list[_Answer], dict[str, float]]:
    args = {"max_running_requests": 16, **({} if device == "cpu" else EXACT)}
    async with running_pair(
        _POLICIES,
        {**args, "max_total_tokens": options.thinker_tokens},
        {**args, "max_total_tokens": options.talker_tokens},
        "",
        devices=(indexed(device),) * 2,
        lends=False,
        elastic=is_elastic,
    ) as pair:
        if is_elastic:
            await _until_known(pair)
        first = await _answer(pair, prompts[0])
        rest = await asyncio.gather(*(_answer(pair, prompt) for prompt in prompts[1:]))
        mover = pair.mover
        counts = dict(mover.report())
        assert pair.thinker.client is not None
        load = (await pair.thinker.client.ping(10.0)).load
        counts["thinker_tokens"] = load.get("policy_elastic_tokens", 0.0)
        counts["longest_resize_s"] = load.get("policy_elastic_longest_resize_s", 0.0)
    return [first, *rest], counts


async def _until_known(pair: Pair) -> None:
    """The thinker knows what the talker could give."""
    async with asyncio.timeout(60):
        while not pair.mover.report().get("thinker_obtainable"):
            await asyncio.sleep(0.1)


async def _answer(pair: Pair, ids: list[int]) -> _Answer:
    params = {"max_new_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    async with native_client(pair.thinker.spec, _REQUEST_TIMEOUT_S) as client:
        found = await client.post("/generate", json={"input_ids": ids, "sampling_params": params})
    if found.status_code != 200:
        return _Answer([], found.text)
    return _Answer(found.json()["output_ids"], "")


def judge(served: dict[str, Any], options: Options) -> list[str]:
    problems = [a["error"] for a in (*served["answers"], *served["fixed"]) if a["error"]]
    if [a["tokens"] for a in served["answers"]] != [a["tokens"] for a in served["fixed"]]:
        problems.append("answers differ from those of a pool of a fixed size")
    counts = served["moves"]
    if not counts.get("moves_urgent") or served["tokens"] <= options.thinker_tokens:
        problems.append("no memory has moved to the thinker")
    for name in ("granules_lost", "moves_failed", "refused_unmapped", "returned"):
        if counts.get(name):
            problems.append(f"{name}: {counts[name]:.0f}")
    return problems
