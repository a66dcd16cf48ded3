"""Gives the processes of a server's stages a modelled device.

What SGLang and the vocoder wait for, the end of a batch or of a copy, comes when the modelled time
has passed; everything else is the product's, which knows nothing of it.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.attachment import around, sglangs_scheduler
from lab.modelled_device.clock import STAGES
from lab.modelled_device.device import DEVICE_MODEL_ENV, modelled_device
from lab.upstream.comparison import Upstream, differences
from sglang_live.attachment import ATTACH_ENV
from sglang_live.bridge.platform import cpu
from sglang_live.errors import SeamError
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.vocoder.batcher import Decoding, VocoderBatch

UPSTREAM = (
    Upstream("sglang.srt.managers.cache_controller", attributes="L2TransferEngine"),
    Upstream(
        "sglang.srt.mem_cache.l2_transfer.L2TransferEngine",
        functions={
            "__init__": "self, io_backend",
            "submit_device_to_host": "self, transfers",
            "submit_host_to_device": (
                "self, transfers, *, transfer_layer_id_max, start_event=, on_layer_done="
            ),
        },
    ),
    Upstream(
        "sglang.srt.mem_cache.l2_transfer.TransferCompletion",
        functions={"__init__": "self, *args, **kwargs"},
        attributes="timing_enabled",
    ),
)


def environment(device_model: Path | str | None) -> dict[str, str]:
    """device_model: a file (benchmark/notes/device_model.md); None or "": no modelled device."""
    if not device_model:
        return {}
    path = str(Path(device_model).resolve())
    return {ATTACH_ENV: "lab.modelled_device.attach:attach", DEVICE_MODEL_ENV: path}


def attach(place: str) -> None:
    spec = StageSpec.from_env()
    if spec.stage not in STAGES:
        return  # it computes nothing
    if place == "stage":
        _attach_to_stage(spec)
    else:
        _attach_to_sglang()


def _attach_to_stage(spec: StageSpec) -> None:
    if not cpu.is_active():
        sys.exit("error: a modelled device is for machines without a GPU, and this one has one")
    if spec.stage == "vocoder":
        from sglang_live.stages.vocoder.stage import VocoderStage

        around(VocoderStage, "load", _load_with_counters)
        around(VocoderBatch, "launch", _launch_on_clock)
    else:
        from sglang_live.stages.engine_host import EngineHost

        around(EngineHost, "load", _load_with_counters)


def _attach_to_sglang() -> None:
    from sglang.srt.managers import cache_controller

    from lab.modelled_device.batches import run_batch_on_clock
    from lab.modelled_device.link import ModelledLink

    if found := [text for names in UPSTREAM for text in differences(names)]:
        raise SeamError("; ".join(found))
    around(sglangs_scheduler(), "run_batch", run_batch_on_clock)
    cache_controller.L2TransferEngine = ModelledLink


def _load_with_counters(load: Callable[[Any], dict[str, float]], stage: Any) -> dict[str, float]:
    return {**modelled_device().clock.report(), **load(stage)}


def _launch_on_clock(launch: Callable[[VocoderBatch], Decoding], batch: VocoderBatch) -> Decoding:
    """Around VocoderBatch.launch."""
    if batch.codes is None:
        return launch(batch)
    device = modelled_device()
    began_s = time.monotonic()
    done = device.compute(device.model.vocoder.decode_s(len(batch.jobs)), began_s)
    decoding = launch(batch)
    device.clock.count_computation(time.monotonic() - began_s)
    return replace(decoding, arrived=done)
