"""The streamed vocoder: the same samples on the device as on the CPU, and ms per chunk.

Random weights: the cost does not depend on them. Serving uses PyTorch's default float32, which has
TF32 in convolutions; agreement is required of float32 without it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import exact_float32, median_ms
from lab.random_model.vocoder import random_code2wav
from sglang_live.models.qwen3_omni.code2wav import StreamingCode2Wav

N_CHECKED_STREAMS = 2
CHECKED_CHUNKS = (2, 4, 4, 1)  # frames, in turn: first chunks are short
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes: transformers' defaults, which are those of Qwen3-Omni-30B-A3B.

    checked_frames: frames compared with the CPU; more than the window, so that frames leave it.
    tolerance: largest difference of a sample in [-1, 1]; float32 itself is within 2e-6 of
        float64, 1e-4 is -80 dB of full scale.
    """

    hidden: int = 1024
    intermediate: int = 3072
    layers: int = 8
    heads: int = 16
    decoder_dim: int = 1536
    codebook: int = 2048
    window: int = 72
    checked_frames: int = 88
    tolerance: float = 1e-4
    batches: tuple[int, ...] = (1, 8, 32)
    chunks: tuple[int, ...] = (1, 2, 4)
    repeats: int = 20


TINY = Options(
    hidden=32,
    intermediate=64,
    layers=2,
    heads=2,
    decoder_dim=32,
    codebook=64,
    window=4,
    checked_frames=11,
    batches=(1, 2),
    chunks=(1, 2),
    repeats=1,
)


def run(options: Options, device: str, seed: int) -> Findings:
    place = torch.device(device)
    module = build(options, seed)
    errors = compare(module, options, place, seed)
    problems = []
    if not errors["float32"] <= options.tolerance:  # NaN must not pass
        problems.append(
            f"float32 samples differ from the CPU by up to {errors['float32']:.2e}, "
            f"allowed {options.tolerance:.0e}"
        )
    if not errors["float32_graphs"] <= options.tolerance:
        problems.append(
            f"graphs differ from the CPU by up to {errors['float32_graphs']:.2e}, "
            f"allowed {options.tolerance:.0e}"
        )
    rows, failed = [], 0
    for name, dtype in _DTYPES.items():
        for arithmetic in (name, f"{name}_graphs"):
            decoder = StreamingCode2Wav(module, device=place, dtype=dtype)
            if arithmetic != name:
                use_graphs(decoder, place, max(options.batches))
            rows += measure(decoder, arithmetic, options)
            failed += decoder.graphs.counts["failed_captures"] if decoder.graphs else 0
    if failed:
        problems.append(f"{failed} shapes were not captured")
    figures = {"max_error_to_cpu_float32": errors, "chunks": rows}
    return Findings(figures, tuple(problems), tuple(_lines(errors, rows)))


def build(options: Options, seed: int) -> Qwen3OmniMoeCode2Wav:
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
    return random_code2wav(config, seed)


def compare(
    module: Qwen3OmniMoeCode2Wav, options: Options, device: torch.device, seed: int
) -> dict[str, float]:
    """Largest difference of any sample from float32 on the CPU, by arithmetic."""
    codes = _codes(options, N_CHECKED_STREAMS, options.checked_frames, seed)

    def wave(place: torch.device | str, dtype: torch.dtype, graphs: bool = False) -> Tensor:
        decoder = StreamingCode2Wav(module, device=place, dtype=dtype)
        if graphs:
            use_graphs(decoder, torch.device(place), len(codes))
        return _stream(decoder, codes)

    with exact_float32():
        expected = wave("cpu", torch.float32)
        waves = {"float32": wave(device, torch.float32)}
        waves["float32_graphs"] = wave(device, torch.float32, graphs=True)
    waves["float32_as_served"] = wave(device, torch.float32)
    waves["bfloat16"] = wave(device, torch.bfloat16)
    return {name: (found - expected).abs().max().item() for name, found in waves.items()}


def use_graphs(decoder: StreamingCode2Wav, device: torch.device, max_streams: int) -> None:
    """CUDA graphs; on a CPU the same buffers and sizes, with a replay that computes again."""
    decoder.use_graphs(max_streams, None if device.type == "cuda" else lambda call: call)


def measure(decoder: StreamingCode2Wav, dtype: str, options: Options) -> list[dict[str, Any]]:
    rows = []
    for batch in options.batches:
        streams = [decoder.new_stream() for _ in range(batch)]
        for _ in range(4):  # until the attention window is full
            decoder.decode(streams, _codes(options, batch, -(-options.window // 4), 0))
        for n_frames in options.chunks:
            codes = _codes(options, batch, n_frames, seed=0)
            device = streams[0].columns.device
            ms = median_ms(
                lambda streams=streams, codes=codes: decoder.decode(streams, codes),
                device,
                options.repeats,
            )
            audio_ms = 1e3 * n_frames * decoder.samples_per_frame / decoder.sample_rate_hz
            rows.append(
                {
                    "dtype": dtype,
                    "batch": batch,
                    "chunk_frames": n_frames,
                    "ms_per_chunk": ms,
                    "realtime_factor": ms / (batch * audio_ms),
                }
            )
    return rows


def _stream(decoder: StreamingCode2Wav, codes: Tensor) -> Tensor:
    """Decode codes [n_streams, n_frames, n_quantizers] in chunks; the result is on the CPU."""
    streams = [decoder.new_stream() for _ in codes]
    waves, begin, i = [], 0, 0
    while begin < codes.shape[1]:
        chunk = codes[:, begin : begin + CHECKED_CHUNKS[i % len(CHECKED_CHUNKS)]]
        waves.append(decoder.decode(streams, chunk).cpu())
        begin, i = begin + chunk.shape[1], i + 1
    return torch.cat(waves, dim=1)


def _codes(options: Options, n_streams: int, n_frames: int, seed: int) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    n_quantizers = Qwen3OmniMoeCode2WavConfig().num_quantizers
    return torch.randint(options.codebook, (n_streams, n_frames, n_quantizers), generator=noise)


def _lines(errors: dict[str, float], rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"max error, {name.replace('_', ' ')}: {error:.2e}" for name, error in errors.items()]
    lines.append("arithmetic       batch  frames  ms/chunk  time per second of audio")
    for row in rows:
        lines.append(
            f"{row['dtype']:15}  {row['batch']:5d}  {row['chunk_frames']:6d}  "
            f"{row['ms_per_chunk']:8.2f}  {row['realtime_factor']:8.4f}"
        )
    return lines
