"""LiveKit Agents as a client of the Live API: a session without a room, with a microphone.

    python livekit_live.py URL RECORDING client|responses

RECORDING: int16 at 24 kHz. The application asks for a greeting; then the user speaks. The
application answers what the model delegates, or has a function for the text model that does.
Prints one JSON object.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool
from livekit.agents.voice import io
from livekit.plugins.openai import realtime

RATE_HZ, FRAME_BYTES, FRAME_S = 24_000, 960, 0.02
SAID = Path(sys.argv[2]).read_bytes()
DELEGATION = sys.argv[3]
WITHIN_S = 60
RESULT = "It rains."


called: list[str] = []


@function_tool
async def weather(town: str) -> str:
    """The weather of a town."""
    called.append(town)
    return RESULT


class Microphone(io.AudioInput):
    def __init__(self) -> None:
        super().__init__(label="microphone")
        self.left, self._due_s = b"", time.monotonic()

    async def __anext__(self) -> rtc.AudioFrame:
        self._due_s += FRAME_S
        await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
        frame, self.left = self.left[:FRAME_BYTES], self.left[FRAME_BYTES:]
        return rtc.AudioFrame(frame.ljust(FRAME_BYTES, b"\0"), RATE_HZ, 1, FRAME_BYTES // 2)


class Loudspeaker(io.AudioOutput):
    """sound_s: seconds that are no silence."""

    def __init__(self) -> None:
        capabilities = io.AudioOutputCapabilities(pause=False)
        super().__init__(label="loudspeaker", capabilities=capabilities, sample_rate=RATE_HZ)
        self.sound_s, self._utterance_s = 0.0, 0.0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._utterance_s:
            self.on_playback_started(created_at=time.time())
        self._utterance_s += frame.duration
        if any(frame.data.tobytes()):
            self.sound_s += frame.duration

    def flush(self) -> None:
        super().flush()
        self._end(interrupted=False)

    def clear_buffer(self) -> None:
        self._end(interrupted=True)

    def _end(self, *, interrupted: bool) -> None:
        if self._utterance_s:
            played_s, self._utterance_s = self._utterance_s, 0.0
            self.on_playback_finished(playback_position=played_s, interrupted=interrupted)


async def main(url: str) -> None:
    model = realtime.GPTLiveModel(base_url=f"{url}/v1", api_key="none", delegation=DELEGATION)
    session = AgentSession(llm=model)
    microphone, loudspeaker = Microphone(), Loudspeaker()
    session.input.audio, session.output.audio = microphone, loudspeaker
    said: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    errors: list[str] = []

    @session.on("conversation_item_added")
    def note(event) -> None:
        if event.item.type == "message":
            said.put_nowait((event.item.role, event.item.text_content))

    @session.on("error")
    def fail(event) -> None:
        errors.append(str(event.error))

    async def next_of(role: str) -> str:
        async with asyncio.timeout(WITHIN_S):
            while True:
                whose, text = await said.get()
                if whose == role:
                    return text

    tools = [weather] if DELEGATION == "responses" else []
    await session.start(Agent(instructions="Be brief.", tools=tools))
    live = session.current_agent.duplex_session

    @live.on("delegation_created")
    def do(delegation) -> None:
        live.append_commentary(RESULT, delegation_id=delegation.id)

    session.generate_reply(instructions="Greet the user.")
    greeting = await next_of("assistant")
    await asyncio.sleep(1)
    microphone.left = SAID
    answer = ""  # one message, or several if there is silence in it
    while RESULT not in answer:
        answer += await next_of("assistant")
    await session.aclose()
    await model.aclose()
    report = {"greeting": greeting, "answer": answer, "errors": errors, "called": called}
    print(json.dumps({**report, "sound_s": loudspeaker.sound_s}))


asyncio.run(main(sys.argv[1]))
