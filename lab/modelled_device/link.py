"""Copies between tiers of KV that take a modelled link's time, where both are one memory.

One queue per direction and device, as on PCIe: latency, then bytes over bandwidth. A token has the
bytes of the modelled model's KV, not those of the small model that computes.
"""

import time
from typing import Any

from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine, TransferCompletion

from lab.modelled_device.clock import (
    FROM_PEER,
    TO_DEVICE,
    TO_HOST,
    TO_PEER,
    ModelledEvent,
    Work,
)
from lab.modelled_device.device import modelled_device
from sglang_live.extensions.lending.engine.peer_pool import PeerPool


class ModelledLink(L2TransferEngine):
    def __init__(self, io_backend: str):
        super().__init__(io_backend)
        self._device = modelled_device()

    def submit_device_to_host(self, transfers: list[L2Transfer]) -> TransferCompletion:
        work = self._book(transfers, to_device=False)
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
        work = self._book(transfers, to_device=True)

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
        self._device.next_batch_waits(work.done_s)
        return _completion(work, ModelledEvent(work))

    def _book(self, transfers: list[L2Transfer], *, to_device: bool) -> Work:
        """Work from the begin of the first to the end of the last: links do not wait for each
        other.
        """
        link = self._device.model.link
        now_s = time.monotonic()
        links = {
            False: (TO_DEVICE, link.to_device_s) if to_device else (TO_HOST, link.to_host_s),
            True: (FROM_PEER if to_device else TO_PEER, link.peer_s),
        }
        n_tokens = {False: 0, True: 0}
        for transfer in transfers:
            is_lent = isinstance(transfer.host_pool, PeerPool)
            n_tokens[is_lent] += len(transfer.device_indices)
        booked = []
        for is_lent, n in n_tokens.items():
            if n:
                queue, cost_s = links[is_lent]
                n_bytes = n * self._device.engine_costs.kv_token_bytes
                booked.append(self._device.clock.book(queue, cost_s(n_bytes), launched_s=now_s))
        began_s = min((work.began_s for work in booked), default=now_s)
        return Work(began_s, max((work.done_s for work in booked), default=now_s))


def _completion(work: Work, finish: ModelledEvent) -> TransferCompletion:
    begin = ModelledEvent(Work(work.began_s, work.began_s))
    return TransferCompletion(begin, finish, True)
