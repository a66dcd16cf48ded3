"""Run one check and write its findings as JSON; scripts/gpu_check.sh runs all checks.

A check that takes long yields its findings as they grow, and its document is written each time.

    python -m benchmark.gpu code_predictor --device cuda --batches 1,8,32

Exit status: 0 passed, 1 failed, 2 wrong usage, 77 cannot run here.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmark.ending import end_like_ctrl_c
from benchmark.gpu.findings import CannotRunError, Findings
from benchmark.load.provenance import facts

_ENGINE = ("torch", "numpy", "transformers", "msgspec", "zmq", "psutil", "sglang_live")
_SERVER = (*_ENGINE, "websockets", "soundfile", "soxr", "onnxruntime", "onnx", "fastapi")
# Imports of each check beyond the standard library.
CHECKS = {
    "code_predictor": ("torch", "numpy", "sglang_live"),
    "code2wav": ("torch", "numpy", "safetensors", "transformers", "sglang_live"),
    "flow": ("torch", "numpy", "sglang_live"),
    "page_copy": ("torch",),
    "write_back": ("torch", "sglang"),
    "shared_memory": ("torch", "sglang"),
    "lending": (*_ENGINE, "httpx"),
    "elastic": (*_ENGINE, "httpx"),
    "talker": _ENGINE,
    "thinker": (*_ENGINE, "httpx"),
    "constants": (*_ENGINE, "httpx"),
    "full_constants": (*_ENGINE, "httpx", "soundfile"),
    "full_load": _SERVER,
    "full_policies": _SERVER,
    "server": _SERVER,
    "syncs": _SERVER,
    "voice_load": _SERVER,
    "speech": (*_SERVER, "httpx"),
}
PASSED, FAILED, CANNOT_RUN = 0, 1, 77


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] not in CHECKS:
        print(__doc__.strip(), f"\n\nchecks: {', '.join(CHECKS)}", file=sys.stderr)
        return 2
    name = argv[0]
    try:
        _import_needed(CHECKS[name])
        check = importlib.import_module(f"benchmark.gpu.{name}")
        args = _parser(name, check.Options).parse_args(argv[1:])
        _require_device(args.device)
        start = check.TINY if args.tiny else check.Options()
        given = {name: value for name, value in vars(args).items() if hasattr(start, name)}
        options = replace(start, **{n: value for n, value in given.items() if value is not None})
        return _run(name, check, options, args)
    except CannotRunError as reason:
        print(f"skipped: {reason}")
        return CANNOT_RUN


def _run(name: str, check: Any, options: Any, args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    findings = Findings({}, (), ())

    def write(problems: tuple[str, ...]) -> None:
        document = {
            "benchmark": f"gpu_{name}",
            **facts(),
            "device": _device_name(args.device),
            "seed": args.seed,
            "passed": not problems,
            "problems": problems,
            "wall_s": round(time.monotonic() - began_s, 1),
            "options": asdict(options),
            "figures": findings.figures,
        }
        if args.commit:
            document |= {"git_commit": args.commit, "git_dirty": None}
        path = args.out / _file_name(name, document["device"])
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        for end, text in findings.files.items():
            path.with_name(f"{path.stem}_{end}").write_text(text, "utf-8")

    try:
        found = check.run(options, args.device, args.seed)
        for findings in [found] if isinstance(found, Findings) else found:
            write((*findings.problems, "the check did not end"))
    except CannotRunError:
        raise
    except Exception as error:
        # The edge of the process: an exception fails the check and goes into its document.
        traceback.print_exc()
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        problem = f"{type(cause).__name__}: {cause}"
        findings = replace(findings, problems=(*findings.problems, problem))
    write(findings.problems)
    for line in (*findings.lines, *(f"PROBLEM: {problem}" for problem in findings.problems)):
        print(line)
    return FAILED if findings.problems else PASSED


def _import_needed(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library that does not load
            raise CannotRunError(f"{name} does not import: {error}") from error


def _require_device(device: str) -> None:
    if not device.startswith("cuda"):
        return
    _import_needed(("torch",))
    import torch

    if not torch.cuda.is_available():
        raise CannotRunError("PyTorch sees no NVIDIA GPU")


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    return f"cuda: {torch.cuda.get_device_name(device)}"


def _file_name(check: str, device: str) -> str:
    words = device.removeprefix("cuda: ").lower().replace("nvidia", "").split()
    return f"{check}_{'-'.join(words)}_{datetime.now(UTC):%Y-%m-%d}.json"


def _parser(name: str, options: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmark.gpu {name}",
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--seed", type=int, default=1, help="of weights and inputs")
    parser.add_argument("--commit", help="recorded where the checkout has no git history")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds")
    results = Path(__file__).parents[1] / "results" / "gpu"
    parser.add_argument("--out", type=Path, default=results, help="folder of the JSON document")
    for field in fields(options):
        kind = _numbers if isinstance(field.default, tuple) else field.type
        flag = "--" + field.name.replace("_", "-")
        help_text = f"see the module (default: {field.default})"
        parser.add_argument(flag, type=kind, help=help_text)
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    # The script's limit of time ends a check with SIGTERM: what it has started must end, too.
    end_like_ctrl_c()
    sys.exit(main())
