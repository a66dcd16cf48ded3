"""A transcription session through OpenAI's SDK: the events of a recording.

    python openai_transcription.py URL RECORDING

RECORDING: int16 at 24 kHz. Prints one JSON object.
"""

import asyncio
import base64
import json
import sys
from pathlib import Path

from openai import AsyncOpenAI

RATE_HZ, CHUNK_BYTES, CHUNK_S = 24_000, 4_800, 0.1
SAID = Path(sys.argv[2]).read_bytes() + bytes(2 * 2 * RATE_HZ)
WITHIN_S = 60


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    types, texts, shown = [], [], None
    intent = {"intent": "transcription"}
    async with client.realtime.connect(model="gpt-4o-transcribe", extra_query=intent) as socket:
        heard = {"transcription": {"model": "gpt-4o-transcribe", "language": "en"}}
        await socket.session.update(session={"type": "transcription", "audio": {"input": heard}})

        async def speak() -> None:
            for at in range(0, len(SAID), CHUNK_BYTES):
                audio = base64.b64encode(SAID[at : at + CHUNK_BYTES]).decode()
                await socket.input_audio_buffer.append(audio=audio)
                await asyncio.sleep(CHUNK_S)

        speaking = asyncio.create_task(speak())
        async with asyncio.timeout(WITHIN_S):
            async for event in socket:
                types.append(event.type)
                if event.type == "session.updated":
                    shown = event.session.type
                if event.type.endswith("transcription.completed"):
                    texts.append(event.transcript)
                    break
        speaking.cancel()
    print(json.dumps({"types": types, "texts": texts, "shown": shown}))


asyncio.run(main())
