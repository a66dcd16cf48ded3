"""Times of the batches of an engine: what each computes, its launch, and its result's arrival."""

import time
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_live.bridge.batch_work import BatchWork, Launch
from sglang_live.bridge.rate_meter import RateMeter
from sglang_live.bridge.rounds import Rounds
from sglang_live.policy.view import FRAME_S

# An audio token of the thinker lasts as long as a codec frame.
AUDIO_TOKEN_S = FRAME_S


def launch_work(batch: ScheduleBatch, rounds: Rounds) -> BatchWork | None:
    """Record the launch of a batch. Returns None if it computes nothing that is measured."""
    if batch.forward_mode.is_decode():
        n_context = int(batch.seq_lens_cpu.sum()) if rounds.tells_best_effort else 0
        return rounds.launch_decode(batch.reqs, n_context)
    if batch.forward_mode.is_extend():
        return rounds.launch_prefill(_prefill_work(batch), batch.reqs)
    return None


def _prefill_work(batch: ScheduleBatch) -> BatchWork:
    lengths = list(zip(batch.prefix_lens, batch.extend_lens, strict=True))
    return BatchWork(
        0,
        n_tokens=batch.extend_num_tokens,
        audio_s=encoded_audio_s(batch),
        n_pairs=attended_pairs(batch),
        n_context=sum(n * prefix for prefix, n in lengths),
        n_squared=sum(n * n for _, n in lengths),
        n_loaded=sum(map(_loaded_tokens, batch.reqs, batch.prefix_lens)),
    )


def _loaded_tokens(req: Req, prefix_len: int) -> int:
    """Tokens of KV that are loaded from the host with a prompt's first chunk."""
    n_tokens: int = req.host_loaded_length
    return n_tokens if prefix_len <= req.num_matched_prefix_tokens else 0


def attended_pairs(batch: ScheduleBatch) -> int:
    """Pairs of a prefill's new tokens with the tokens that they attend to."""
    lengths = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    return sum(n * prefix + n * (n + 1) // 2 for prefix, n in lengths)


def encoded_audio_s(batch: ScheduleBatch) -> float:
    """Seconds of audio that a prefill encodes: the clips that begin in it.

    A clip that began in an earlier chunk comes from SGLang's cache of embeddings.
    """
    spans = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
    return sum(audio_s_of(req, prefix, prefix + n) for req, prefix, n in spans)


def audio_s_of(req: Req, begin: int, end: int) -> float:
    """Seconds of the clips that begin at one of these places of the request's tokens."""
    if req.multimodal_inputs is None:
        return 0.0
    n_tokens = sum(
        last + 1 - first
        for item in req.multimodal_inputs.mm_items
        if item.is_audio()
        for first, last in item.offsets or ()
        if begin <= first < end
    )
    return n_tokens * AUDIO_TOKEN_S


def stamp_launch(result: Any, launch: Launch, device_module: Any) -> None:
    """Mark a result with its launch. Called right after the launch.

    Args:
        result: GenerationBatchResult or EmbeddingBatchResult.
        device_module: torch.cuda, or that of another device.
    """
    result.launch = launch
    if result.copy_done is None:  # without overlap SGLang records no event
        result.copy_done = device_module.Event()
        result.copy_done.record()


def book_arrival(result: Any, meter: RateMeter) -> None:
    """Wait for a result, as SGLang does next, and book its batch."""
    launch: Launch | None = getattr(result, "launch", None)
    if launch is not None:
        result.copy_done.synchronize()
        meter.arrived(launch, time.monotonic())
