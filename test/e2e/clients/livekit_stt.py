"""LiveKit's recogniser over a socket, as in an agent: what it hears of a recording.

    python livekit_stt.py URL RECORDING

RECORDING: int16 at 24 kHz. Prints one JSON object.
"""

import asyncio
import json
import sys
from pathlib import Path

from livekit import rtc
from livekit.agents import stt, utils
from livekit.plugins import openai

RATE_HZ, FRAME_BYTES, FRAME_S = 24_000, 4_800, 0.1
SAID = Path(sys.argv[2]).read_bytes() + bytes(2 * 2 * RATE_HZ)
WITHIN_S = 60


async def main() -> None:
    async with utils.http_context.open():
        recogniser = openai.STT(
            model="gpt-4o-mini-transcribe",
            use_realtime=True,
            base_url=f"{sys.argv[1]}/v1",
            api_key="none",
        )
        stream = recogniser.stream()

        async def speak() -> None:
            for at in range(0, len(SAID), FRAME_BYTES):
                frame = SAID[at : at + FRAME_BYTES].ljust(FRAME_BYTES, b"\0")
                stream.push_frame(rtc.AudioFrame(frame, RATE_HZ, 1, FRAME_BYTES // 2))
                await asyncio.sleep(FRAME_S)

        speaking = asyncio.create_task(speak())
        kinds, texts = [], []
        async with asyncio.timeout(WITHIN_S):
            async for event in stream:
                kinds.append(event.type.value)
                if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                    texts.append(event.alternatives[0].text)
                    break
        speaking.cancel()
        await stream.aclose()
        print(json.dumps({"kinds": kinds, "texts": texts}))


asyncio.run(main())
