"""Page allocation for prefill without Triton: upstream's own torch version of the same function."""

TARGET = "sglang.srt.mem_cache.allocator.paged.alloc_extend_kernel"
KIND = "define"
SIGNATURE = None
WHY = "page sizes above 1 allocate through a Triton kernel, which needs a GPU driver"
DROP_WHEN = "the paged allocator falls back to alloc_extend_naive on CPU"
STAGES = ("*",)
CPU_ONLY = True


class _Launcher:
    def __getitem__(self, grid):
        return self._run

    @staticmethod
    def _run(prefix_lens, seq_lens, last_loc, free_pages, out, bs_upper, page_size):
        from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

        alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out, page_size, out.device)


HOOK = _Launcher()
