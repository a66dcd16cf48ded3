"""What speech costs on a modelled H100 (80 GB, HBM3 with 3.35 TB/s), by the shapes of models.

    python -m benchmark.speaking_models

prints every constant with its source. A source begins with what it is: "derived" from a published
shape by a rule below, "published", or "estimate". Nothing here was measured on an H100 but what
H100 has, the device model of Qwen3-Omni.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_live.extensions.planner.device_model.costs import (
    EagerCosts,
    TalkerCosts,
    VocoderCosts,
)
from sglang_live.extensions.planner.device_model.model import SpeechModel
from sglang_live.models.codecs.flow.padding import padded_shape
from sglang_live.stages.vocoder.config import VocoderConfig

# NVIDIA's data sheet, and the shares of it that decoding, prefills and attention reach
# (h100_qwen3_omni.toml, h100_orpheus.toml).
_READ_BYTES_PER_S, _KV_BYTES_PER_S = 0.64 * 3.35e12, 1.9e12
_DECODE_FLOPS, _PREFILL_FLOPS = 0.33 * 989e12, 0.30 * 989e12
# Of --vocoder.precision: dense TFLOP/s, and the share of it that a flow reaches. HiFT, and other
# decoders, compute in float32, which PyTorch does not multiply in TF32.
_FLOPS = {"float32": (67, 0.6), "TF32": (495, 0.3), "bfloat16": (989, 0.3)}
_FLOAT32_FLOPS = 0.6 * 67e12
# The measured code predictor of H100: 75 layer steps in a graph.
_LAYER_MS, _LAYER_STREAM_MS = 8.06 / 75, 0.05 / 75
_PREFILL_LAYER_MS = 0.3
# Of a kernel without a graph the thread: published, 2,423 in 31.6 ms, 940 in 11 ms, 420 in 5.4 ms
# (github.com/sgl-project/sglang-omni/pull/2122, pull/1675, pull/729).
_LAUNCH_US = 12.5
# And the device, beside what it computes: H100's vocoder takes 2.1 ms in a graph for these 940.
_KERNEL_US = 2.1e3 / 940


# Copies of a batch of six streams into the buffers of its graphs, and out of them.
_FILL_LAUNCHES = 11


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """
    parameters: that a step reads.
    n_pair: prompts that share a request for guidance.
    sampler_ms, sampler_stream_ms: beside the layers.
    """

    source: str
    n_layers: int
    parameters: float
    n_kv_heads: int
    head_dim: int
    n_pair: int = 1
    sampler_ms: float = 0.3
    sampler_stream_ms: float = 0.005

    @property
    def figures(self) -> dict[str, Figure]:
        n_bytes, flop = 2 * self.parameters, 2 * self.parameters * self.n_pair
        kv_bytes = 4 * self.n_layers * self.n_kv_heads * self.head_dim * self.n_pair
        read_ms, layers_ms = 1e3 * n_bytes / _READ_BYTES_PER_S, self.n_layers * _LAYER_MS
        of, pair = self.source, " of both prompts" if self.n_pair > 1 else ""
        return {
            "decode_fixed_ms": Figure(
                max(read_ms, layers_ms),
                f"derived: {n_bytes / 1e9:.2f} GB at 64 % of 3.35 TB/s take {read_ms:.2f} ms, "
                f"{self.n_layers} layer steps by the measured 8.06 ms of 75 in H100 {layers_ms:.2f}"
                f" ({of})",
            ),
            "decode_per_stream_ms": Figure(
                1e3 * flop / _DECODE_FLOPS,
                f"derived: {flop / 1e9:.2f} GFLOP{pair} at 33 % of 989 TFLOP/s",
            ),
            "decode_per_kv_token_ns": Figure(
                1e9 * kv_bytes / _KV_BYTES_PER_S, "derived: kv_token_bytes at 1.9 TB/s, as in H100"
            ),
            "code_predictor_fixed_ms": Figure(
                self.sampler_ms, "estimate: there is none; drawing, with its masks and penalties"
            ),
            "code_predictor_per_stream_ms": Figure(self.sampler_stream_ms, "estimate: likewise"),
            "prefill_fixed_ms": Figure(
                self.n_layers * _PREFILL_LAYER_MS,
                f"estimate: {self.n_layers} layers without a CUDA graph at 0.3 ms each, as in H100",
            ),
            "prefill_per_token_us": Figure(
                1e6 * flop / _PREFILL_FLOPS,
                f"derived: {flop / 1e9:.2f} GFLOP at 30 % of 989 TFLOP/s",
            ),
            "kv_token_bytes": Figure(
                kv_bytes,
                f"derived: {self.n_layers} layers, {self.n_kv_heads} KV heads of {self.head_dim}, "
                f"keys and values{pair}, 2 bytes ({of})",
            ),
            "n_layers": Figure(self.n_layers, of),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Euler's steps of an estimator with guidance, an encoder before, and HiFT behind.

    n_kernels: of a step. n_begin_kernels: of the encoder, and what else is computed once.
    n_hift_kernels: of HiFT, which runs kernel by kernel.
    weights: that a column is multiplied by in a step, beside attention.
    attention: layers times the width of their heads.
    code_weights: that a code is multiplied by in encoder and HiFT, if HiFT computes all of them
        again.
    in_graphs: of the begin and of a step, in padded batches.
    """

    source: str
    n_kernels: int
    n_begin_kernels: int
    n_hift_kernels: int
    weights: float
    attention: int
    code_weights: float
    columns: float = 2.0
    n_steps: int = 10
    precision: str = "float32"
    in_graphs: bool = False

    @property
    def figures(self) -> dict[str, Figure]:
        n = self.n_steps * self.n_kernels + self.n_begin_kernels + self.n_hift_kernels
        dense, part = _FLOPS[self.precision]
        rate, at = part * dense * 1e12, f"{100 * part:.0f} % of {dense} TFLOP/s"
        passes = 2 * self.n_steps * self.columns  # guided and free
        flop = 2 * (passes * self.weights + self.code_weights)
        pair_flop = 2 * passes * self.columns * 2 * self.attention
        counted = (
            f"{self.n_steps} times {self.n_kernels} kernels, {self.n_begin_kernels} before and "
            f"{self.n_hift_kernels} behind them, counted in models/codecs "
            "(test_speaking_kernels.py)"
        )
        n_launches, of_graphs = n, {}
        if self.in_graphs:
            n_launches = self.n_steps + 1 + _FILL_LAUNCHES + self.n_hift_kernels
            of_graphs["beyond_ms"] = Figure(
                n * _LAUNCH_US / 1e3, f"derived: {n:,} launches at 12.5 us, without graphs"
            )
        return of_graphs | {
            "launch_ms": Figure(
                n_launches * _LAUNCH_US / 1e3,
                f"derived: {n_launches:,} launches at 12.5 us; {counted}",
            ),
            "fixed_ms": Figure(
                n * _KERNEL_US / 1e3, f"derived: {n:,} kernels at 2.2 us, as in H100's vocoder"
            ),
            "per_code_us": Figure(
                1e6 * flop / rate,
                f"derived: {flop / 1e9:.2f} GFLOP at {at} ({self.source}; {self.n_steps} steps, "
                "guided and free)",
            ),
            "per_pair_ns": Figure(
                1e9 * pair_flop / rate,
                f"derived: {pair_flop / 1e6:.2f} MFLOP of attention at {at}, likewise",
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts(EagerCosts):
    """In graphs, whose batches are padded.

    beyond_ms: launches of a batch that is larger than all of them.
    """

    beyond_ms: float

    def decode_s(self, n_streams: int, n_codes: int) -> float:
        shape = padded_shape(n_streams, n_codes, max(n_streams, VocoderConfig().max_batch))
        if shape is None:
            return max(EagerCosts.decode_s(self, n_streams, n_codes), self.beyond_ms / 1e3)
        return EagerCosts.decode_s(self, *shape)


def _codec(launch_ms: Figure, fixed_ms: Figure) -> Mapping[str, Figure]:
    """Of a codec that keeps its state, so that a chunk costs the same wherever it is."""
    none = Figure(0.001, "derived: nothing, its chunks are in vocoder.per_chunk_ms")
    return {
        "launch_ms": launch_ms,
        "fixed_ms": fixed_ms,
        "per_code_us": none,
        "per_pair_ns": none,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """
    name: of the model.
    decoder_ms, chunk_ms: of a batch of the decoder, beside eager.
    stream_mb: that its decoder keeps of a stream.
    """

    name: str
    language_model: LanguageModel
    weights_gb: Figure
    decoder_ms: Figure
    chunk_ms: Figure
    stream_mb: Figure
    eager: "Flow | Mapping[str, Figure]"

    @property
    def figures(self) -> dict[str, Figure]:
        found = {
            "memory_gb": Figure(80, "NVIDIA's data sheet"),
            "weights_gb": self.weights_gb,
            "spare_gb": Figure(8, "estimate: activations, graphs, and the CUDA context"),
            "stream_mb": self.stream_mb,
            "vocoder.fixed_ms": self.decoder_ms,
            "vocoder.per_chunk_ms": self.chunk_ms,
        }
        eager = self.eager.figures if isinstance(self.eager, Flow) else self.eager
        for section, figures in ("talker", self.language_model.figures), ("eager", eager):
            found |= {f"{section}.{name}": figure for name, figure in figures.items()}
        return found

    @property
    def model(self) -> SpeechModel:
        figures = self.figures
        values = {name: figure.value for name, figure in figures.items()}

        def section(name: str) -> dict[str, float]:
            begin = f"{name}."
            return {k.removeprefix(begin): v for k, v in values.items() if k.startswith(begin)}

        return SpeechModel(
            name=f"NVIDIA H100 SXM, {self.name}",
            digest=hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12],
            estimates=tuple(n for n, f in figures.items() if f.source.startswith("estimate")),
            memory_gb=values["memory_gb"],
            weights_gb=values["weights_gb"],
            spare_gb=values["spare_gb"],
            talker=TalkerCosts(**section("talker")),
            vocoder=VocoderCosts(**section("vocoder")),
            encoder=None,
            eager=(GraphCosts if "eager.beyond_ms" in figures else EagerCosts)(**section("eager")),
        )

    def facts(self) -> dict[str, Any]:
        """For a document."""
        figures = {n: [round(f.value, 6), f.source] for n, f in self.figures.items()}
        return {**self.model.facts(), "figures": figures}


# CosyVoice's and Chatterbox' estimator: 14 stages of a residual block and 4 transformer layers of
# 256 with 8 heads of 64, of which a column is multiplied by 1.05e6 weights each.
_UNET_WEIGHTS = 56 * 1.05e6 + 14 * 0.46e6
_UNET_KERNELS, _ENCODER_KERNELS, _HIFT_KERNELS = 818, 275, 561
_CONFORMER = 6 * 3.4e6 + 2 * 4 * 3.4e6
# HiFT: 12e9 multiplications a second by its layers (base_channels 512, upsample_rates 8, 5, 3).
_HIFT_CODE = 12e9 * 0.04
_HIFT_CHUNK = Figure(
    1e3 * 2 * 24e9 / _FLOAT32_FLOPS,
    "derived: HiFT of 2 s, 24 GFLOP a second (cosyvoice2.yaml), at 60 % of 67 TFLOP/s",
)
_IN_EAGER = Figure(0.01, "derived: nothing, it is in eager's figures")
_UNET = Flow(
    source="cosyvoice2.yaml: 56 layers of 256, residual blocks; conformer of 512; counted above",
    n_kernels=_UNET_KERNELS,
    n_begin_kernels=_ENCODER_KERNELS,
    n_hift_kernels=_HIFT_KERNELS,
    weights=_UNET_WEIGHTS,
    attention=56 * 512,
    code_weights=_CONFORMER,
    in_graphs=True,
)
_QWEN_05 = LanguageModel(
    source="config.json of Qwen2.5-0.5B: 24 layers of 896, and 6,564 codes",
    n_layers=24,
    parameters=0.364e9,
    n_kv_heads=2,
    head_dim=64,
)
_COSYVOICE_2 = Shape(
    name="CosyVoice 2 in bf16, its flow in float32",
    language_model=_QWEN_05,
    weights_gb=Figure(2.3, "published: 0.5e9 parameters of 2 bytes; 0.32e9 of 4 in the decoder"),
    decoder_ms=_IN_EAGER,
    chunk_ms=_HIFT_CHUNK,
    stream_mb=Figure(0.1, "derived: codes, and 8 columns of mel and sound"),
    eager=_UNET,
)
_COSYVOICE_2_HALF = replace(
    _COSYVOICE_2,
    name="CosyVoice 2, its flow in bf16",
    eager=replace(_UNET, precision="bfloat16"),
)
SHAPES: Mapping[str, Shape] = {
    "cosyvoice2": _COSYVOICE_2,
    "cosyvoice2_eager": replace(
        _COSYVOICE_2,
        name="CosyVoice 2, its flow in float32 without graphs",
        eager=replace(_UNET, in_graphs=False),
    ),
    "cosyvoice2_tf32": replace(
        _COSYVOICE_2,
        name="CosyVoice 2, its flow in TF32",
        eager=replace(_UNET, precision="TF32"),
    ),
    "cosyvoice2_graphs": _COSYVOICE_2_HALF,
    "cosyvoice2_mps": replace(_COSYVOICE_2_HALF, name=f"{_COSYVOICE_2_HALF.name}, with MPS"),
    "cosyvoice3": Shape(
        name="CosyVoice 3 in bf16, its flow in float32",
        language_model=_QWEN_05,
        weights_gb=Figure(
            2.5, "published: 0.5e9 parameters of 2 bytes; 0.35e9 of 4 in the decoder"
        ),
        decoder_ms=_IN_EAGER,
        chunk_ms=_IN_EAGER,
        stream_mb=Figure(0.1, "derived: codes, and 320 bytes of mel a column"),
        eager=Flow(
            source="cosyvoice3.yaml: DiT of 22 layers of 1,024",
            n_kernels=783,
            n_begin_kernels=31,
            n_hift_kernels=570,
            weights=22 * 8 * 1024**2,
            attention=22 * 1024,
            code_weights=_HIFT_CODE,
            in_graphs=True,
        ),
    ),
    "chatterbox": Shape(
        name="Chatterbox in bf16, its flow in float32",
        language_model=LanguageModel(
            source="LLAMA_520M_CONFIG_DICT: 30 layers of 1,024, and 8,194 codes",
            n_layers=30,
            parameters=0.512e9,
            n_kv_heads=16,
            head_dim=64,
            n_pair=2,
        ),
        weights_gb=Figure(2.4, "published: 0.53e9 parameters of 2 bytes; 0.32e9 of 4 in S3Gen"),
        decoder_ms=_IN_EAGER,
        chunk_ms=_HIFT_CHUNK,
        stream_mb=Figure(0.1, "derived: codes"),
        eager=_UNET,
    ),
    "step_audio2": Shape(
        name="Step-Audio 2 mini in bf16",
        language_model=LanguageModel(
            source="config.json of stepfun-ai/Step-Audio-2-mini: 28 layers of 3,584, 158,720 ids",
            n_layers=28,
            parameters=7.1e9,
            n_kv_heads=4,
            head_dim=128,
        ),
        weights_gb=Figure(
            17.5, "published: 8.3e9 parameters of 2 bytes; 0.2e9 of 4 in the decoder"
        ),
        decoder_ms=_IN_EAGER,
        chunk_ms=Figure(
            3.8, "derived: 25 codes of 150 GFLOP at 60 % of 67 TFLOP/s, 164 MB of state at 1.9 TB/s"
        ),
        stream_mb=Figure(164, "derived: 16 x 1,024 x 20 values of 2 bytes a column, prompt + 100"),
        eager=_codec(
            Figure(
                143,
                "published: 143 ms per second of sound on an H100 without a graph "
                "(github.com/vllm-project/vllm-omni/issues/5069)",
            ),
            Figure(62, "published: with TensorRT, likewise"),
        ),
    ),
    "glm4_voice": Shape(
        name="GLM-4-Voice 9B in bf16, its flow in float32",
        language_model=LanguageModel(
            source="config.json of zai-org/glm-4-voice-9b: 40 layers of 4,096, 168,960 ids",
            n_layers=40,
            parameters=8.85e9,
            n_kv_heads=2,
            head_dim=128,
        ),
        weights_gb=Figure(20.5, "published: 9.5e9 parameters of 2 bytes; 0.35e9 of 4 beside it"),
        decoder_ms=_IN_EAGER,
        chunk_ms=_HIFT_CHUNK,
        stream_mb=Figure(0.1, "derived: codes"),
        eager=Flow(
            source="estimate of CosyVoice 1: CosyVoice 2's layers and 8 more",
            n_kernels=round(_UNET_KERNELS * 16 / 14),
            n_begin_kernels=_ENCODER_KERNELS,
            n_hift_kernels=_HIFT_KERNELS,
            weights=_UNET_WEIGHTS * 16 / 14,
            attention=64 * 512,
            code_weights=6 * 3.4e6,
            columns=0.08 * 22_050 / 256,
        ),
    ),
    "higgs_v2": Shape(
        name="Higgs Audio v2 3B in bf16",
        language_model=LanguageModel(
            source="config.json of transformers' higgs_audio_v2: 28 layers of 3,072, whose audio "
            "feed-forward alone decodes; 8 books of 1,026",
            n_layers=28,
            parameters=2.85e9,
            n_kv_heads=8,
            head_dim=128,
            sampler_ms=0.6,
            sampler_stream_ms=0.01,
        ),
        weights_gb=Figure(11.8, "published: 5.8e9 parameters of 2 bytes, and the codec's"),
        decoder_ms=_IN_EAGER,
        chunk_ms=Figure(0.1, "estimate: as SNAC's in h100_orpheus.toml"),
        stream_mb=Figure(1, "estimate: the inputs of its convolutions"),
        eager=_codec(
            Figure(5.4, "published: 420 kernels (github.com/sgl-project/sglang-omni/pull/729)"),
            Figure(2.17, "published: in a graph, likewise"),
        ),
    ),
    "moss_tts": Shape(
        name="MOSS-TTS 8B in bf16",
        language_model=LanguageModel(
            source="config.json of OpenMOSS-Team/MOSS-TTS: Qwen3-8B's 36 layers of 4,096, 32 books "
            "of 1,025",
            n_layers=36,
            parameters=7.1e9,
            n_kv_heads=8,
            head_dim=128,
            sampler_ms=1.0,
            sampler_stream_ms=0.02,
        ),
        weights_gb=Figure(23.0, "published: 8.3e9 parameters of 2 bytes, 1.6e9 of 4 in the codec"),
        decoder_ms=_IN_EAGER,
        chunk_ms=Figure(
            0.3, "estimate: of 4 frames, by 10.3 ms of 9 more of 16 streams in graphs, as below"
        ),
        stream_mb=Figure(
            150,
            "derived: 10 s of keys and values of 4 bytes, 32 layers of 1,280 at 12.5 Hz, 12 of "
            "768 at 25, 50 and 100",
        ),
        eager=_codec(
            Figure(
                66,
                "published: 16 streams without a graph, whatever their 4 to 13 frames "
                "(github.com/sgl-project/sglang-omni/pull/798)",
            ),
            Figure(25, "published: likewise, in a graph 30.1 ms with 4 frames of 16 streams"),
        ),
    ),
    "zonos": Shape(
        name="Zonos v0.1 in bf16",
        language_model=LanguageModel(
            source="config.json of Zyphra/Zonos-v0.1-transformer: 26 layers of 2,048, 9 books",
            n_layers=26,
            parameters=1.6e9,
            n_kv_heads=4,
            head_dim=128,
            n_pair=2,
            sampler_ms=0.6,
            sampler_stream_ms=0.01,
        ),
        weights_gb=Figure(3.6, "published: 1.6e9 parameters of 2 bytes, and DAC's 0.08e9 of 4"),
        decoder_ms=_IN_EAGER,
        chunk_ms=Figure(0.1, "estimate: as SNAC's in h100_orpheus.toml, whose layers it has"),
        stream_mb=Figure(1, "estimate: the inputs of its convolutions"),
        eager=_codec(
            Figure(3.0, "estimate: likewise, 150 launches without a graph"),
            Figure(150 * _KERNEL_US / 1e3, "derived: 150 kernels at 2.2 us"),
        ),
    ),
}


def main() -> None:
    for shape in SHAPES.values():
        print(f"\n{shape.model.name}")
        for name, figure in shape.figures.items():
            print(f"  {name:36} {figure.value:14,.3f}  {figure.source}")


if __name__ == "__main__":
    main()
