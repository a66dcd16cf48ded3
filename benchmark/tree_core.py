"""Cost of SGLang's radix tree by its core: Rust, which stays in use, against Python.

    python -m benchmark.tree_core --prompts 100,1000,10000 --json out.json

Eviction policies can be plugged into the Python core only. A tree is filled with prompts of a
common beginning. Then, in turn: a resident prompt is looked up; room for a new one is made by LRU
eviction; the new one is inserted. Medians over all turns.
"""

import json
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmark.load.options import read_options
from benchmark.load.provenance import config_of, facts

CORES = ("python", "rust")
STEPS = ("match", "evict", "insert")
PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """One flag per field; lengths in tokens.

    shared: length of the common beginning of all prompts.
    """

    prompts: str = "100,1000,10000"
    length: int = 512
    shared: int = 128
    turns: int = 500
    seed: int = 1
    json: str = ""


def cache_of(core: str, n_tokens: int) -> UnifiedRadixCache:
    kv = MHATokenToKVPool(
        size=n_tokens,
        page_size=PAGE,
        dtype=torch.float16,
        head_num=1,
        head_dim=1,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = PagedTokenToKVPoolAllocator(
        n_tokens, page_size=PAGE, dtype=torch.float16, device="cpu", kvcache=kv, need_sort=False
    )
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
    )


class Tree:
    def __init__(self, core: str, n_prompts: int, options: Options):
        self._options, self._random = options, random.Random(options.seed)
        own = options.length - options.shared
        self._cache = cache_of(core, options.shared + (n_prompts + 1) * own)
        self._prompts: deque[array] = deque(maxlen=max(1, n_prompts // 2))  # surely in the tree
        for _ in range(n_prompts):
            self.insert()()

    def _new(self) -> array:
        own = self._options.length - self._options.shared
        ids = [self._random.randrange(1 << 17) for _ in range(own)]
        return array("q", [*range(self._options.shared), *ids])

    def match(self) -> Callable[[], None]:
        key = RadixKey(self._random.choice(self._prompts))
        params = MatchPrefixParams(key=key)

        def step() -> None:
            assert self._cache.match_prefix(params).device_prefix_len == self._options.length

        return step

    def evict(self) -> Callable[[], None]:
        params = EvictParams(num_tokens=self._options.length - self._options.shared)

        def step() -> None:
            assert self._cache.evict(params).num_tokens_evicted >= params.num_tokens

        return step

    def insert(self) -> Callable[[], None]:
        prompt = self._new()
        self._prompts.append(prompt)
        match = self._cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        held = self._cache.path_device_indices(match.last_device_node)
        slots = self._cache.token_to_kv_pool_allocator.alloc(self._options.length - len(held))
        params = InsertParams(key=RadixKey(prompt), value=torch.cat([held, slots]))
        return lambda: self._cache.insert(params)


def measure(core: str, n_prompts: int, options: Options) -> dict:
    tree = Tree(core, n_prompts, options)
    spent: dict[str, list[float]] = {step: [] for step in STEPS}
    for _ in range(options.turns):
        for name in STEPS:
            step = getattr(tree, name)()
            began_s = time.perf_counter()
            step()
            spent[name].append(time.perf_counter() - began_s)
    row = {f"{name}_us": 1e6 * float(np.median(seconds)) for name, seconds in spent.items()}
    return {"core": core, "prompts": n_prompts, **row}


def main() -> None:
    options = read_options(Options(), __doc__)
    rows = []
    print(f"{'core':8s} {'prompts':>8s}" + "".join(f"{step:>10s} us" for step in STEPS))
    for n_prompts in map(int, options.prompts.split(",")):
        for core in CORES:
            rows.append(row := measure(core, n_prompts, options))
            figures = "".join(f"{row[f'{step}_us']:13.1f}" for step in STEPS)
            print(f"{core:8s} {n_prompts:8d}{figures}", flush=True)
    if options.json:
        document = {"benchmark": "tree_core", **facts(), "config": config_of(options), "rows": rows}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
