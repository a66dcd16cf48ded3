"""Copies between host and device that take a modelled link's time, where both are one memory.

One queue per direction and device, as on PCIe: latency, then bytes over bandwidth. A token has the
bytes of the modelled model's KV, not those of the small model that computes.
"""

import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion

from sglang_live.bridge.modelled.clock import TO_DEVICE, TO_HOST, ModelledEvent, Work
from sglang_live.bridge.modelled.device import ModelledDevice


class ModelledLink(L2TransferEngine):
    def __init__(self, io_backend: str, device: ModelledDevice):
        super().__init__(io_backend)
        self._device = device

    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        work = self._book(TO_HOST, self._device.model.link.to_host_s, transfers)
        super().submit_device_to_host(transfers)
        return _completion(work, ModelledEvent(work))

    def submit_host_to_device(
        self,
        transfers: list[L2Transfer],
        *,
        transfer_layer_id_max: int,
        start_event: Any = None,
        on_layer_done: Any = None,
    ) -> TransferCompletion:
        work = self._book(TO_DEVICE, self._device.model.link.to_device_s, transfers)

        def copy(asked_s: float = 0.0, noticed_s: float = 0.0) -> None:
            L2TransferEngine.submit_host_to_device(
                self,
                transfers,
                transfer_layer_id_max=transfer_layer_id_max,
                start_event=start_event,
                on_layer_done=on_layer_done,
            )

        if on_layer_done is None:
            # Not before its end: a reader that does not wait for it finds nothing.
            return _completion(work, ModelledEvent(work, copy))
        # The prefill that is launched next computes at once, and its result waits for the loads.
        copy()
        self._device.next_batch_waits(work.done_s, transfer_layer_id_max)
        return _completion(work, ModelledEvent(work))

    def _book(
        self, queue: int, cost_s: Callable[[float], float], transfers: list[L2Transfer]
    ) -> Work:
        n_tokens = sum(len(transfer.device_indices) for transfer in transfers)
        n_bytes = n_tokens * self._device.engine_costs.kv_token_bytes
        return self._device.clock.book(queue, cost_s(n_bytes), launched_s=time.monotonic())


def _completion(work: Work, finish: ModelledEvent) -> TransferCompletion:
    begin = ModelledEvent(Work(work.began_s, work.began_s))
    return TransferCompletion(begin, finish, True)
