"""A flow decoder: the same mel on the device as on the CPU, in graphs as without, and ms per batch.

Random weights in CosyVoice 2's shape: the cost does not depend on them. Serving in float32 uses
PyTorch's default, which has TF32 in convolutions; agreement is required of float32 without it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmark.gpu.findings import Findings
from benchmark.gpu.measuring import exact_float32, median_ms, synchronize
from lab.random_model.flow import N_MELS, FlowShape, random_flow, random_hift
from sglang_live.models.codecs.flow import AHEAD, CHUNK
from sglang_live.models.codecs.flow.decoder import FlowDecoder
from sglang_live.models.codecs.flow.mels import FlowInput, FlowVoice, TokenFlow
from sglang_live.models.codecs.hift import hift_of
from sglang_live.models.cuda_graphs import Capture
from sglang_live.stages.vocoder.config import Precision

# As --vocoder.precision has them.
_PRECISIONS: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_OF_GPUS = "tf32", "float16"  # a CPU has not, or is slow with
_VOICE = "voice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Sizes: see FlowShape.

    checked: codes of the streams of a batch that is compared; with the voice's, they are padded.
    prompt: codes of the voice.
    codes: of streams, beside the voice's, whose mel is timed; the first chunk is timed with HiFT.
    tolerance: largest difference of a column in float32, of the peak.
    half_tolerance: the same of a batch in graphs from the one without, in half precision.
    """

    encoder_width: int = 512
    encoder_inner: int = 2048
    encoder_layers: int = 6
    up_layers: int = 4
    width: int = 256
    layers: int = 4
    mid: int = 12
    hift_width: int = 512
    prompt: int = 150
    checked: tuple[int, ...] = (28, 75, 51)
    tolerance: float = 1e-3
    half_tolerance: float = 0.05
    batches: tuple[int, ...] = (1, 4, 16)
    codes: tuple[int, ...] = (28, 78, 178)
    repeats: int = 10

    @property
    def shape(self) -> FlowShape:
        return FlowShape(
            encoder_width=self.encoder_width,
            encoder_inner=self.encoder_inner,
            encoder_layers=self.encoder_layers,
            up_layers=self.up_layers,
            width=self.width,
            layers=self.layers,
            mid=self.mid,
            hift_width=self.hift_width,
        )


TINY = Options(
    encoder_width=32,
    encoder_inner=48,
    encoder_layers=1,
    up_layers=1,
    width=16,
    layers=1,
    mid=1,
    hift_width=16,
    prompt=10,
    checked=(13, 20, 5),
    batches=(2,),
    codes=(18,),
    repeats=1,
)


def run(options: Options, device: str, seed: int) -> Findings:
    place = torch.device(device)
    tensors = random_flow(options.shape, seed), random_hift(options.shape, seed)
    expected = _mels(decoder_of(options, tensors, "cpu", torch.float32), options)
    errors: dict[str, float] = {}
    problems, rows = [], []
    most = max((*options.batches, len(options.checked)))
    for precision, dtype in _PRECISIONS.items():
        if precision in _OF_GPUS and place.type != "cuda":
            continue
        eager, graphed = (decoder_of(options, tensors, place, dtype) for _ in range(2))
        graphs = graphed.use_graphs(most, _capture(place))
        with exact_float32() if precision == "float32" else _arithmetic(precision):
            without, within = _mels(eager, options), _mels(graphed, options)
        errors[precision] = _error(without, expected)
        errors[f"{precision}_graphs_to_eager"] = between = _error(within, without)
        exact = dtype == torch.float32 and precision != "tf32"
        allowed = options.tolerance if exact else options.half_tolerance
        # NaN must not pass.
        if exact and not errors[precision] <= allowed:
            problems.append(f"{precision} differs from the CPU by {errors[precision]:.2e} of peak")
        if not between <= allowed:
            problems.append(f"{precision}: graphs differ from eager by {between:.2e} of the peak")
        with _arithmetic(precision):
            rows += measure(eager, precision, options, place)
            rows += measure(graphed, f"{precision}_graphs", options, place)
        if graphs.counts["failed_captures"] or graphs.counts["fallbacks"]:
            problems.append(f"{precision}: not all ran in graphs: {graphs.counts}")
    figures = {"max_error_of_peak": errors, "batches": rows}
    return Findings(figures, tuple(problems), tuple(_lines(errors, rows)))


def decoder_of(
    options: Options,
    tensors: tuple[dict[str, Tensor], dict[str, Tensor]],
    place: torch.device | str,
    dtype: torch.dtype,
) -> FlowDecoder:
    """dtype: of the flow; HiFT is in float32."""
    device = torch.device(place)
    flow = TokenFlow(tensors[0], device, dtype)
    rng = torch.Generator().manual_seed(0)
    mel = torch.randn(2 * options.prompt, N_MELS, generator=rng)
    voice = flow.voice(_codes(options.prompt), mel.to(device), torch.randn(192, generator=rng))
    return FlowDecoder(flow, hift_of(tensors[1], device, torch.float32), {_VOICE: voice})


def measure(
    decoder: FlowDecoder, arithmetic: str, options: Options, place: torch.device
) -> list[dict[str, Any]]:
    rows = []
    voice = decoder.new_stream(_VOICE).voice
    for batch in options.batches:
        for n in options.codes:
            inputs = [FlowInput(voice, _codes(n), AHEAD, CHUNK)] * batch
            rows.append(
                _row(arithmetic, "mel", batch, n)
                | _times(lambda inputs=inputs: decoder._flow.mels(inputs), place, options.repeats)
            )
        rows.append(
            _row(arithmetic, "first chunk, with HiFT", batch, CHUNK + AHEAD)
            | _times(lambda n=batch: _first_chunk(decoder, n), place, options.repeats)
        )
    return rows


def _times(call: Any, place: torch.device, repeats: int) -> dict[str, float]:
    """Until the device has finished, and until the thread has launched it."""
    with torch.inference_mode():
        ms = median_ms(call, place, repeats)
        synchronize(place)
        begin_s = perf_counter()
        call()
        launch_ms = 1e3 * (perf_counter() - begin_s)
        synchronize(place)
    return {"ms": ms, "launch_ms": launch_ms}


def _first_chunk(decoder: FlowDecoder, n: int) -> None:
    streams = [decoder.new_stream(_VOICE) for _ in range(n)]
    codes = _codes(streams[0].rule.first)[:, None]
    decoder.decode(streams, [codes] * n)


@torch.inference_mode()
def _mels(decoder: FlowDecoder, options: Options) -> list[Tensor]:
    voice = decoder.new_stream(_VOICE).voice
    inputs = [_checked(voice, n, n == max(options.checked)) for n in options.checked]
    return [mel.float().cpu() for mel in decoder._flow.mels(inputs)]


def _checked(voice: FlowVoice, n: int, is_end: bool) -> FlowInput:
    return FlowInput(voice, _codes(n), 0 if is_end else AHEAD, 0 if is_end else CHUNK)


def _error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of the peak, the largest of all streams."""
    return max(
        float((mel - wanted).abs().max() / wanted.abs().max())
        for mel, wanted in zip(found, expected, strict=True)
    )


def _codes(n: int) -> Tensor:
    return torch.arange(n) * 37 % FlowShape().n_codes


def _capture(device: torch.device) -> Capture | None:
    """CUDA graphs; on a CPU the same buffers and shapes, with a replay that computes again."""
    return None if device.type == "cuda" else lambda call: call


@contextmanager
def _arithmetic(precision: Precision) -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _row(arithmetic: str, what: str, batch: int, n: int) -> dict[str, Any]:
    return {"arithmetic": arithmetic, "what": what, "batch": batch, "codes": n}


def _lines(errors: dict[str, float], rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"max error of the peak, {name.replace('_', ' ')}: {e:.2e}" for name, e in errors.items()
    ]
    lines.append("arithmetic         batch  codes        ms  launched in ms")
    for row in rows:
        lines.append(
            f"{row['arithmetic']:17}  {row['batch']:5d}  {row['codes']:5d}  {row['ms']:8.2f}  "
            f"{row['launch_ms']:14.2f}  {row['what']}"
        )
    return lines
