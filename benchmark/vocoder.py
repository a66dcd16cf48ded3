"""Cost of a vocoder chunk with its left context as state, and with 25 frames decoded again.

Run: python -m benchmark.vocoder --json out.json
Random weights: the cost does not depend on them. Both arms alternate within one run.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from benchmark.load.options import read_options
from benchmark.load.provenance import facts
from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav

BATCHES = (1, 8)
CHUNK_FRAMES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Model size (defaults: a tiny demo model) and extent; one flag per field."""

    hidden: int = 128
    intermediate: int = 384
    layers: int = 2
    heads: int = 4
    decoder_dim: int = 128
    codebook: int = 256
    window: int = 8
    context_frames: int = 25  # left_context_size of transformers' chunked_decode
    repeats: int = 15
    seed: int = 1
    device: str = "cpu"
    json: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One batch and chunk size. Times are medians per call; RTF is time per second of audio."""

    batch: int
    chunk_frames: int
    streaming_ms: float
    redecode_ms: float
    streaming_rtf: float
    redecode_rtf: float


def build(options: Options) -> Qwen3OmniMoeCode2Wav:
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=options.codebook,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        sliding_window=options.window,
        decoder_dim=options.decoder_dim,
    )
    return Qwen3OmniMoeCode2Wav(config).eval()


def median_ms(arms: list[Callable[[], object]], repeats: int, device: str) -> list[float]:
    """Time the arms in turn, so that a disturbance of the machine affects all of them."""
    times_ms = [[] for _ in arms]
    for i in range(repeats + 2):
        for arm, own_ms in zip(arms, times_ms, strict=True):
            start_s = time.perf_counter()
            arm()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if i >= 2:  # the first calls allocate and choose kernels
                own_ms.append((time.perf_counter() - start_s) * 1e3)
    return [statistics.median(own_ms) for own_ms in times_ms]


@torch.inference_mode()
def measure(
    module: Qwen3OmniMoeCode2Wav, decoder: StreamingCode2Wav, batch: int, n_frames: int, o: Options
) -> Row:
    shape = (batch, o.context_frames + n_frames, decoder.n_quantizers)
    codes = torch.randint(0, o.codebook, shape, device=o.device)
    context, chunk = codes[:, : o.context_frames], codes[:, o.context_frames :]
    streams = [decoder.new_stream() for _ in range(batch)]
    for _ in range(1 + o.window // o.context_frames):  # until the attention window is full
        decoder.decode(streams, context)
    n_samples = n_frames * decoder.samples_per_frame
    arms = [
        lambda: decoder.decode(streams, chunk),
        lambda: module(codes.transpose(1, 2))[..., -n_samples:].float(),
    ]
    streaming_ms, redecode_ms = median_ms(arms, o.repeats, o.device)
    audio_ms = batch * n_samples / decoder.sample_rate_hz * 1e3
    rtfs = streaming_ms / audio_ms, redecode_ms / audio_ms
    return Row(batch, n_frames, streaming_ms, redecode_ms, *rtfs)


def print_table(rows: list[Row]) -> None:
    print("batch  frames  streaming ms  re-decode ms  speed-up  streaming RTF  re-decode RTF")
    for row in rows:
        speed_up = row.redecode_ms / row.streaming_ms
        print(
            f"{row.batch:5d}  {row.chunk_frames:6d}  {row.streaming_ms:12.2f}  "
            f"{row.redecode_ms:12.2f}  {speed_up:7.1f}x  "
            f"{row.streaming_rtf:13.4f}  {row.redecode_rtf:13.4f}"
        )


def main() -> None:
    options = read_options(Options(), __doc__)
    torch.manual_seed(options.seed)
    module = build(options)
    decoder = StreamingCode2Wav(module, device=options.device)
    module.to(options.device)
    rows = [
        measure(module, decoder, batch, n_frames, options)
        for batch in BATCHES
        for n_frames in CHUNK_FRAMES
    ]
    print_table(rows)
    if options.json:
        result = {
            "benchmark": "vocoder",
            **facts(),
            "n_threads": torch.get_num_threads(),
            "options": {k: v for k, v in asdict(options).items() if k != "json"},
            "rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
