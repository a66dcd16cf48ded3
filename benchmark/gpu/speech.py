"""A short run of benchmark.speech_throughput: with and without `service_tier` flex."""

from dataclasses import asdict, dataclass

from benchmark import speech_throughput
from benchmark.gpu.findings import Findings
from benchmark.gpu.places import on_device, platform_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    texts: int = 96
    concurrency: int = 16
    blocks: int = 2
    start_timeout_s: float = 150.0


TINY = Options(texts=2, concurrency=2, blocks=1)


def run(options: Options, device: str, seed: int) -> Findings:
    platform = platform_of(device)
    sizes = speech_throughput.Options(
        texts=options.texts, concurrency=options.concurrency, blocks=options.blocks
    )
    with on_device(device) as server_args:
        rows, arms = speech_throughput.run(sizes, server_args, options.start_timeout_s)
    figures = {"platform": platform, "arms": arms, "rows": [asdict(row) for row in rows]}
    failed = [f"a text failed: {row.arm}, {row.status}" for row in rows if row.status != "200"]
    silent = [f"the {arm} arm has no audio" for arm, found in arms.items() if not found["audio_s"]]
    lines = [
        f"{arm}: inverse RTF {found['inverse_rtf']}, complete after {found['latency_p50_s']} s in "
        f"the median, {found['latency_p95_s']} s P95"
        for arm, found in arms.items()
    ]
    return Findings(figures, (*failed, *silent), tuple(lines))
