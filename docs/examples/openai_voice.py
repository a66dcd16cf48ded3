"""OpenAI's SDK, async: speak a recording as a microphone would, be answered, interrupt.

python docs/examples/openai_voice.py python/sglang_live/assets/question.flac [--interrupt-after 1.5]
"""

import argparse
import asyncio
import base64
import time
import wave

import numpy as np
import soundfile
import soxr
from openai import AsyncOpenAI

RATE_HZ = 24_000
FRAME_S = 0.02


def recording(path: str) -> bytes:
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono = soxr.resample(samples.mean(axis=1), rate_hz, RATE_HZ)
    return (np.clip(mono, -1, 1) * 32767).astype("<i2").tobytes()


async def microphone(call, said: bytes, again: asyncio.Event) -> None:
    """Send 20 ms of sound every 20 ms without end: the recording, then silence."""
    size = round(RATE_HZ * FRAME_S) * 2
    due_s, left = time.monotonic(), said
    while True:
        if again.is_set():
            again.clear()
            left = said
        frame, left = left[:size].ljust(size, b"\0"), left[size:]
        await call.input_audio_buffer.append(audio=base64.b64encode(frame).decode())
        due_s += FRAME_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


async def converse(args: argparse.Namespace) -> None:
    client = AsyncOpenAI(base_url=f"{args.url}/v1", api_key=args.key)
    model = (await client.models.list()).data[0].id
    said, again, answers = recording(args.wav), asyncio.Event(), []
    async with client.realtime.connect(model=model) as call:
        await call.session.update(
            session={
                "type": "realtime",
                "audio": {
                    "input": {
                        "transcription": {"model": "default"},
                        "turn_detection": {"type": "semantic_vad"},
                    }
                },
            }
        )
        speaking = asyncio.create_task(microphone(call, said, again))
        to_come = 2 if args.interrupt_after else 1
        try:
            async for event in call:
                if event.type == "response.created":
                    answers.append(bytearray())
                elif event.type == "response.output_audio.delta":
                    first = not answers[-1]
                    answers[-1] += base64.b64decode(event.delta)
                    if first and args.interrupt_after and len(answers) == 1:
                        asyncio.get_running_loop().call_later(args.interrupt_after, again.set)
                elif event.type == "conversation.item.input_audio_transcription.completed":
                    print(f"you: {event.transcript}")
                elif event.type == "conversation.item.truncated":
                    print(f"interrupted: {event.audio_end_ms} ms of it were heard")
                elif event.type == "error":
                    raise SystemExit(event.error.message)
                elif event.type == "response.done":
                    print(f"answer: {event.response.status}")
                    to_come -= 1
                    if not to_come:
                        break
        finally:
            speaking.cancel()
    with wave.open(args.out, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(bytes(answers[-1]))
    print(f"{len(answers[-1]) / 2 / RATE_HZ:.1f} s of sound: {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wav")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--out", default="answer.wav")
    parser.add_argument("--interrupt-after", type=float, help="seconds into the first response")
    asyncio.run(converse(parser.parse_args()))


if __name__ == "__main__":
    main()
