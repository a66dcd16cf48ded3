"""Cost of a change of a KV pool's size, and the longest prompt of pools that exchange memory.

    python -m benchmark.elastic --json out.json
    python -m benchmark.elastic --only resize --json out.json     # no server

Resize: two pools with SGLang's allocator, half in use, hand one unit of memory to and fro. Measured
is the time that the scheduling thread spends, and the time of the mapping thread, by pool size;
beside it SGLang's own time to free one page of the same pool.
Context: the longest prompt that the thinker answers, by bisection, of a server whose pools have a
fixed size and of one with --elastic-kv, for each page size. Lender, follow: see kv/elastic_load.py.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from benchmark.kv.elastic_load import Load, follow, lender
from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts
from benchmark.load.server import ServerProcess
from sglang_live.extensions.elastic.engine.buffers import BufferPlan, create_elastic_buffers
from sglang_live.extensions.elastic.engine.pool import ElasticPool

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 600.0
N_HEADS, HEAD_DIM = 2, 16  # of the demo model


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field.

    only: one of resize, context, lender, follow; empty: all.
    tokens: sizes of the pools of the first measurement.
    layers: of their model.
    device: of the first one; engines choose theirs.
    moves: of each size.
    pages: page sizes.
    thinker_tokens, talker_tokens: sizes at start with --elastic-kv.
    speeches, runs, longest_tokens, prompt_every_s: of the third one, of each arm.
    phases_s: of the fourth one, with and without long prompts.
    """

    only: str = ""
    tokens: str = "4096,16384,65536,262144,1048576"
    layers: int = 4
    moves: int = 200
    pages: str = "1,16"
    thinker_tokens: int = 1024
    talker_tokens: int = 32_768
    speeches: int = 12
    runs: int = 2
    longest_tokens: int = 8192
    prompt_every_s: float = 0.5
    phases_s: str = "20,75,20,75"
    model_path: str = "demo-random"
    device: str = "cpu"
    seed: int = 1
    json: str = ""


# --- resize ---


class FakeKvPool(SimpleNamespace):
    """What the buffers need to know of SGLang's pool."""

    def _kv_buffer_shapes(self):
        shape = (self.size + self.page_size, N_HEADS, HEAD_DIM)
        return shape, shape


class Pool:
    """A pool without an engine, half of whose pages are in use."""

    def __init__(self, tokens: int, page: int, layers: int, rng: random.Random, device: str):
        kv = FakeKvPool(
            size=tokens,
            page_size=page,
            layer_num=layers,
            store_dtype=torch.float32,
            kv_cache_layout="nhd",
            device=device,
        )
        plan = BufferPlan(2, lambda _, geometry, n: geometry.units(n) * geometry.granules)
        create_elastic_buffers(plan, kv)
        args = (torch.float32, device, kv, False)
        self.allocator = (
            TokenToKVPoolAllocator(tokens, *args)
            if page == 1
            else PagedTokenToKVPoolAllocator(tokens, page, *args)
        )
        self.elastic = ElasticPool(self.allocator)
        for buffer in (*kv.k_buffer, *kv.v_buffer):
            buffer[: self.allocator.size] = 1.0  # every page of memory exists, as in use
        # In the lower three quarters every page is in use but for a third, in random order.
        n_pages = self.allocator.size // page * 3 // 4
        held = self.allocator.alloc(n_pages * page).view(n_pages, page)
        freed = torch.tensor(rng.sample(range(n_pages), n_pages // 3))
        self.allocator.free(held[freed].reshape(-1))


def measure_resize(tokens: int, page: int, options: Options) -> dict:
    rng = random.Random(options.seed)
    pools = [Pool(tokens, page, options.layers, rng, options.device) for _ in range(2)]
    unit = pools[0].elastic.memory.geometry.granules
    names = ("drain", "shrink", "grow", "map", "unmap", "free")
    spent: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, step: Callable):
        began_s = time.perf_counter()
        result = step()
        spent[name].append(time.perf_counter() - began_s)
        return result

    for n in range(options.moves):
        pair = pools if n % 2 else pools[::-1]
        giver, receiver = (pool.elastic for pool in pair)
        receiver_allocator = pair[1].allocator
        timed("drain", lambda giver=giver: giver.begin_drain(unit))
        began_s = time.perf_counter()
        releasing = giver.release(unit)
        passed = releasing.result()
        spent["unmap"].append(time.perf_counter() - began_s)
        files = [os.dup(file) for file in passed.files]
        giver.released()
        began_s = time.perf_counter()
        receiver.receive(passed.runs, files)
        while not receiver.mapped():
            time.sleep(0)
        spent["map"].append(time.perf_counter() - began_s)
        page_ids = receiver_allocator.alloc(page)
        timed("free", lambda ids=page_ids, of=receiver_allocator: of.free(ids))
        spent["shrink"] += giver.take_resize_s()
        spent["grow"] += receiver.take_resize_s()
    skipped = min(20, options.moves // 4)  # the first calls of each operator are slower
    row = {}
    for name, seconds in spent.items():
        kept = 1e6 * np.array(seconds[skipped:])
        row |= {f"{name}_us_p50": float(np.median(kept)), f"{name}_us_p99": _p99(kept)}
    n_bytes = unit * pools[0].elastic.memory.geometry.granule_bytes
    return {"tokens": tokens, "page": page, "layers": options.layers, "unit_bytes": n_bytes, **row}


def _p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


# --- context ---


def longest_prompt(url: str, options: Options) -> dict:
    """Bisect between a prompt that is answered and one that is refused."""
    rng = random.Random(options.seed)
    with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:

        def answers(n_tokens: int) -> bool:
            body = {
                "input_ids": [rng.randrange(10, 200) for _ in range(n_tokens)],
                "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
            }
            answer = client.post("/generate", json=body)
            if answer.status_code != 200:
                refusals.append(answer.json()["error"]["message"])
            return answer.status_code == 200

        refusals: list[str] = []
        low, high = options.thinker_tokens // 2, 32_000
        assert answers(low), refusals
        n_tried = 1
        while high - low > max(1, low // 200):
            middle = (low + high) // 2
            low, high = (middle, high) if answers(middle) else (low, middle)
            n_tried += 1
    return {"longest_prompt": low, "tried": n_tried, "refusal": refusals[-1]}


def measure_context(page: int, elastic: bool, options: Options) -> dict:
    with server_of(options, page, elastic, options.thinker_tokens) as server:
        found = longest_prompt(f"http://127.0.0.1:{server.port}", options)
    return {"page": page, "arm": "elastic" if elastic else "fixed", **found}


def server_of(options: Options, page: int, elastic: bool, thinker_tokens: int) -> ServerProcess:
    args = (
        "--thinker.max-total-tokens",
        str(thinker_tokens),
        "--talker.max-total-tokens",
        str(options.talker_tokens),
        "--page-size",
        str(page),
        *(["--elastic-kv"] if elastic else []),
    )
    return ServerProcess(options.model_path, "all", args, START_TIMEOUT_S)


# --- load ---


def load_of(options: Options) -> Load:
    return Load(
        speeches=options.speeches,
        longest_tokens=options.longest_tokens,
        prompt_every_s=options.prompt_every_s,
        seed=options.seed,
    )


def measure_lender(elastic: bool, options: Options) -> Iterator[dict]:
    """Speech alone, and beside prompts."""
    room = options.thinker_tokens if elastic else 2 * options.longest_tokens
    with server_of(options, 1, elastic, room) as server:
        for prompts in (False, True):
            found = asyncio.run(lender(server, load_of(options), prompts=prompts))
            yield {"arm": "elastic" if elastic else "fixed", "beside_prompts": prompts, **found}


def measure_follow(options: Options) -> list[dict]:
    phases_s = list(map(float, options.phases_s.split(",")))
    with server_of(options, 1, True, options.thinker_tokens) as server:
        return asyncio.run(follow(server, load_of(options), phases_s))


def main() -> None:
    options = read_options(Options(), __doc__, only=("", *PARTS))
    torch.set_num_threads(1)  # as in an engine on a CPU
    document = {"benchmark": "elastic", **facts(), "config": config_of(options)}
    for part, rows_of in PARTS.items():
        if options.only in ("", part):
            document[part] = rows = []
            for row in rows_of(options):
                rows.append(row)
                print(part, json.dumps(rounded(row)), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def rounded(row: dict) -> dict:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}


def resize_rows(options: Options) -> Iterator[dict]:
    for page in map(int, options.pages.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            yield measure_resize(tokens, page, options)


def context_rows(options: Options) -> Iterator[dict]:
    for page in map(int, options.pages.split(",")):
        for elastic in (False, True):
            yield measure_context(page, elastic, options)


def lender_rows(options: Options) -> Iterator[dict]:
    for run in range(options.runs):
        for elastic in (False, True) if run % 2 == 0 else (True, False):
            yield from measure_lender(elastic, options)


PARTS = {
    "resize": resize_rows,
    "context": context_rows,
    "lender": lender_rows,
    "follow": measure_follow,
}


if __name__ == "__main__":
    main()
