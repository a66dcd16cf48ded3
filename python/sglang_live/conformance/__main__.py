"""Check a server.

    python -m sglang_live.conformance --url http://127.0.0.1:30000 [--profile core --profile audio]

In: a running server. Out: one line per check; 1 if any fails. A failure that is expected is no one:
--expect names a JSON file of such checks with reasons, and this server's own are known.
"""

import argparse
import asyncio
import json
import sys
import time
import wave
from collections.abc import Awaitable, Callable
from pathlib import Path

from sglang_live.conformance.live_checks import LIVE
from sglang_live.conformance.realtime_checks import AUDIO, CORE, TOOLS, TRANSCRIPTION
from sglang_live.conformance.report import BAD, Outcome, Result, as_junit, as_text, summary
from sglang_live.conformance.server import RATE_HZ, Server, Skip, Violation
from sglang_live.conformance.webrtc_checks import WEBRTC
from sglang_live.environment import start_in_utf8_mode

Check = Callable[[Server], Awaitable[None]]

PROFILES: dict[str, tuple[Check, ...]] = {
    "core": CORE,
    "audio": AUDIO,
    "tools": TOOLS,
    "webrtc": WEBRTC,
    "transcription": TRANSCRIPTION,
    "live": LIVE,
}
# Where this package's server does otherwise, and why.
OWN_DEVIATIONS: dict[str, str] = {}
_LONGEST_S = 180.0


async def run(server: Server, profile: str, check: Check, expected: dict[str, str]) -> Result:
    name = getattr(check, "__name__", "")
    what = (check.__doc__ or "").strip()
    outcome: Outcome = "passed"
    why, began_s = "", time.monotonic()
    try:
        async with asyncio.timeout(_LONGEST_S):
            await check(server)
    except Skip as skip:
        outcome, why = "skipped", str(skip)
    except TimeoutError:
        outcome, why = "failed", f"it takes longer than {_LONGEST_S:g} s"
    except Exception as error:  # of any type: what comes may be anything
        outcome = "failed"
        why = str(error) if isinstance(error, Violation) else repr(error)
    reason = expected.get(f"{profile}/{name}")
    if reason is not None and outcome == "failed":
        outcome, why = "expected", f"{why} (known: {reason})"
    elif reason is not None and outcome == "passed":
        outcome, why = "repaired", f"it was expected to fail: {reason}"
    return Result(profile, name, what, outcome, why, time.monotonic() - began_s)


async def run_all(server: Server, profiles: list[str], expected: dict[str, str]) -> list[Result]:
    results = []
    for profile in profiles:
        for check in PROFILES[profile]:
            results.append(await run(server, profile, check, expected))
            print(as_text(results[-1]), flush=True)
    return results


def _speech(path: Path) -> bytes:
    with wave.open(str(path), "rb") as file:
        form = (file.getnchannels(), file.getsampwidth(), file.getframerate())
        if form != (1, 2, RATE_HZ):
            raise SystemExit(f"{path}: speech is mono PCM16 at {RATE_HZ} Hz, this is {form}")
        return file.readframes(file.getnframes())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_live.conformance")
    parser.add_argument("--url", required=True, help="http://host:port")
    parser.add_argument("--key", help="API key")
    parser.add_argument("--model", help="model; the first that the server lists by default")
    parser.add_argument(
        "--profile", action="append", choices=[*PROFILES], help="several times; all by default"
    )
    parser.add_argument("--speech", type=Path, help="WAV of a voice; the server's own by default")
    parser.add_argument("--expect", type=Path, help="JSON: checks that may fail, with reasons")
    parser.add_argument("--junit", type=Path, help="file to write")
    args = parser.parse_args()
    speech = _speech(args.speech) if args.speech else None
    server = Server(args.url, args.key, args.model, speech)
    expected: dict[str, str] = json.loads(args.expect.read_text("utf-8")) if args.expect else {}

    async def check() -> list[Result]:
        await server.look()
        own = OWN_DEVIATIONS if server.is_ours else {}
        return await run_all(server, args.profile or [*PROFILES], {**own, **expected})

    try:
        results = asyncio.run(check())
    except Violation as error:
        raise SystemExit(str(error)) from None
    print(f"\n{summary(results)}")
    if args.junit:
        args.junit.write_text(as_junit(results), encoding="utf-8")
    sys.exit(any(result.outcome in BAD for result in results))


if __name__ == "__main__":
    start_in_utf8_mode()
    main()
