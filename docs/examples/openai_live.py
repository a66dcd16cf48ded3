"""OpenAI's SDK, async, with the Live API: speak a recording, do what is delegated, be answered.

python docs/examples/openai_live.py python/sglang_live/assets/question.flac
"""

import argparse
import asyncio
import base64
import wave

from openai import AsyncOpenAI
from openai_voice import RATE_HZ, recording

FRAME_S = 0.1
# Sound comes at the pace of time, silence included; this much of it ends an answer.
PAUSE_S = 1.0


async def microphone(call, said: bytes) -> None:
    size = round(RATE_HZ * FRAME_S) * 2
    while True:
        frame, said = said[:size].ljust(size, b"\0"), said[size:]
        await call.session.input_audio.append(audio=base64.b64encode(frame).decode())
        await asyncio.sleep(FRAME_S)


async def converse(args: argparse.Namespace) -> None:
    client = AsyncOpenAI(base_url=f"{args.url}/v1", api_key=args.key)
    model = (await client.models.list()).data[0].id
    answer, silence, text = bytearray(), bytearray(), ""
    async with client.live.connect() as call:
        await call.session.start(session={"model": model, "instructions": "Be brief."})
        speaking = asyncio.create_task(microphone(call, recording(args.wav)))
        try:
            async for event in call:
                if event.type == "session.output_audio.delta":
                    sound = base64.b64decode(event.delta)
                    if any(sound):
                        answer += silence + sound
                        silence.clear()
                    elif answer:
                        silence += sound
                    if len(silence) / 2 / RATE_HZ >= PAUSE_S:
                        break
                elif event.type == "session.input_transcript.delta":
                    print(f"you: {event.delta}")
                elif event.type == "session.output_transcript.delta":
                    text += event.delta
                elif event.type == "session.delegation.created":
                    # Here an application would look something up.
                    await call.session.commentary.append(
                        content="I can only answer questions.", delegation_id=event.delegation.id
                    )
                elif event.type == "error":
                    raise SystemExit(event.error.message)
        finally:
            speaking.cancel()
        await call.session.close()
    with wave.open(args.out, "wb") as file:
        file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        file.writeframes(bytes(answer))
    print(f"answer: {text}")
    print(f"{len(answer) / 2 / RATE_HZ:.1f} s of sound: {args.out}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wav")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--key", default="none")
    parser.add_argument("--out", default="answer.wav")
    asyncio.run(converse(parser.parse_args()))


if __name__ == "__main__":
    main()
