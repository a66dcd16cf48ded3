"""The whole server: one spoken turn, then one that the user interrupts and repeats.

With the built-in demo model, through the real-time protocol, as a client at real-time pace.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmark.gpu.findings import Findings
from benchmark.gpu.places import on_device, platform_of
from benchmark.load.server import ServerError, ServerProcess
from lab.load_client.options import LoadOptions
from lab.load_client.realtime_client import Interruption, RealtimeClient
from lab.load_client.utterance import Utterance
from sglang_live.client import clip
from sglang_live.client.clip import BUNDLED_CLIP
from sglang_live.clock import MonotonicClock
from sglang_live.extensions.planner.simulation.turn_record import BARGE_IN, TurnRecord

MODEL_NAME = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """interrupted_after_s: from the first packet of the second response."""

    model_path: str = "demo"
    interrupted_after_s: float = 0.5
    start_timeout_s: float = 200.0
    turn_timeout_s: float = 30.0


# The demo model is as small as a server can be.
TINY = Options()


def run(options: Options, device: str, seed: int) -> Findings:
    args = ("--served-model-name", MODEL_NAME)
    with on_device(device) as stage_args:
        server = ServerProcess(
            options.model_path, "all", (*args, *stage_args), options.start_timeout_s
        )
        try:
            with server:
                turns = asyncio.run(_converse(server.url, options))
                figures = {"platform": platform_of(device), "start_s": server.start_s}
        except ServerError as error:
            return Findings({}, (str(error).splitlines()[0],), tuple(str(error).splitlines()[1:]))
    return judge(figures, turns)


def judge(figures: dict[str, Any], turns: list[TurnRecord]) -> Findings:
    """turns: whole, interrupted, and the one that interrupts."""
    whole, interrupted, last = turns
    figures = figures | {
        name: turn.to_json()
        for name, turn in (("whole", whole), ("interrupted", interrupted), ("last", last))
    }
    problems = [
        f"the {name} response: {turn.status}, {turn.error or 'no error'}, {turn.audio_s:.1f} s"
        for name, turn in (("whole", whole), ("last", last))
        if turn.status != "completed" or not turn.audio_s
    ]
    if interrupted.interruption != BARGE_IN or not interrupted.cut_short:
        problems.append("the second response was not interrupted: it was over before")
    lines = (
        f"platform {figures['platform']}, ready after {figures['start_s']:.0f} s",
        f"first audio {whole.ttfp_ms or 0:.0f} ms after the speech, "
        f"reply {whole.audio_s:.1f} s, {whole.gaps_over_100ms} audible gaps",
        f"interrupted after {interrupted.heard_s:.1f} s, "
        f"last packet {interrupted.stop_latency_ms or 0:.0f} ms after the voice",
    )
    return Findings(figures, tuple(problems), lines)


async def _converse(url: str, options: Options) -> list[TurnRecord]:
    session = LoadOptions(url=url, model=MODEL_NAME, turn_timeout_s=options.turn_timeout_s)
    async with RealtimeClient(session, MonotonicClock()) as client:
        question = Utterance.of(clip.load_pcm(BUNDLED_CLIP), session.frames_per_message)
        whole = (await client.take_turn(question)).record()
        await client.wait_until_played()
        interrupted = await client.take_turn(question, Interruption(options.interrupted_after_s))
        last = await client.take_turn(question)
        return [whole, interrupted.record(), last.record()]
