"""Page allocation for decode without Triton."""

import torch

TARGET = "sglang.srt.mem_cache.allocator.paged.alloc_decode_kernel"
KIND = "define"
SIGNATURE = None
WHY = "page sizes above 1 allocate through a Triton kernel, which needs a GPU driver"
DROP_WHEN = "the paged allocator has a torch fallback for decode on CPU"
STAGES = ("*",)
CPU_ONLY = True


class _Launcher:
    def __getitem__(self, grid):
        return self._run

    @staticmethod
    def _run(seq_lens, last_loc, free_pages, out, bs_upper, page_size):
        """One new slot per request: on a fresh page when the last one is full."""
        needs_page = (seq_lens - 1) % page_size == 0
        nth_new_page = (torch.cumsum(needs_page, 0) - 1).clamp(min=0)
        # The allocator detects a short pool after this; indices must only stay in range.
        nth_new_page = nth_new_page.clamp(max=max(free_pages.numel() - 1, 0))
        fresh = free_pages[nth_new_page] * page_size if free_pages.numel() else last_loc + 1
        out.copy_(torch.where(needs_page, fresh, last_loc + 1))


HOOK = _Launcher()
