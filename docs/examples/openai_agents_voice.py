"""OpenAI's Agents SDK: an agent with a function, asked in writing and by voice.

python docs/examples/openai_agents_voice.py python/sglang_live/assets/question.flac
"""

import argparse
import asyncio
import time

import numpy as np
import soundfile
import soxr
from agents import function_tool, set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner

RATE_HZ = 24_000
FRAME = round(0.02 * RATE_HZ)


@function_tool
def weather(town: str) -> str:
    """The weather of a town."""
    return f"It rains in {town}."


def recording(path: str) -> np.ndarray:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate_hz, RATE_HZ)
    return (np.clip(mono, -1, 1) * 32767).astype("<i2")


async def speak(session, samples: np.ndarray) -> None:
    """Send a recording at its pace, and then silence without end, as a microphone does."""
    due_s, at = time.monotonic(), 0
    while True:
        said = samples[at : at + FRAME]
        await session.send_audio(np.pad(said, (0, FRAME - len(said))).tobytes())
        at += FRAME
        due_s += FRAME / RATE_HZ
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def answer(session) -> float:
    """Wait for a response; returns seconds of sound."""
    n_bytes = 0
    async for event in session:
        if event.type == "audio":
            n_bytes += len(event.audio.data)
        elif event.type == "audio_end":
            return n_bytes / 2 / RATE_HZ
        elif event.type == "tool_start":
            print(f"calls {event.tool.name}")
        elif event.type == "error":
            raise SystemExit(str(event.error))
    raise SystemExit("the session ended")


async def converse(args: argparse.Namespace) -> None:
    set_tracing_disabled(True)
    agent = RealtimeAgent(name="Guide", instructions="Be brief.", tools=[weather])
    runner = RealtimeRunner(agent)
    url = f"{args.url}/v1/realtime"
    session = await runner.run(model_config={"url": url, "api_key": args.key})
    async with session:
        await session.send_message("Good morning.")
        print(f"typed: {await answer(session):.1f} s of sound")
        speaking = asyncio.create_task(speak(session, recording(args.wav)))
        print(f"spoken: {await answer(session):.1f} s of sound")
        speaking.cancel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wav")
    parser.add_argument("--url", default="ws://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    asyncio.run(converse(parser.parse_args()))


if __name__ == "__main__":
    main()
