"""The job of one turn in the vocoder: makes sound of codes, or of text."""

import asyncio
from collections.abc import AsyncGenerator

from sglang_live.core import OUTPUT_RATE_HZ, AudioDelta
from sglang_live.messages import (
    Pcm,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderRequest,
    VocoderText,
)
from sglang_live.orchestrator.stage_jobs import FLEX_TIMEOUT_S, JOB_TIMEOUT_S, SpokenText
from sglang_live.orchestrator.startup_delay import StartupDelays
from sglang_live.stages.transport.job import Job


class VocoderJob:
    """
    Args:
        voice, flex: see VocoderRequest.
        startup_delays: for how long the first audio is withheld. None: not at all.

    Attributes:
        audio_s: duration of the audio that has come.
    """

    def __init__(
        self,
        job: Job,
        voice: str = "",
        startup_delays: StartupDelays | None = None,
        *,
        flex: bool = False,
    ):
        self._job, self._voice, self._startup_delays = job, voice, startup_delays
        self._flex = flex
        self._begun = False
        self._ready = asyncio.Event()
        self.audio_s = 0.0

    def cancel(self) -> None:
        self._job.cancel()

    async def decode(self, speech: bytes | SpokenText) -> None:
        """Make sound of the response's next codes or text."""
        if not self._begun:
            limit_s = FLEX_TIMEOUT_S if self._flex else JOB_TIMEOUT_S
            await self._job.begin(
                VocoderRequest(self._job.job_id, limit_s, voice=self._voice, flex=self._flex)
            )
            self._begun = True
            self._ready.set()
        if isinstance(speech, SpokenText):
            message = VocoderText(self._job.job_id, speech.text, speech.n_tokens)
            await self._job.send(message)
        else:
            await self._job.send(VocoderFrames(self._job.job_id, speech))

    async def end(self) -> None:
        """No more frames, or text, will come."""
        if self._begun:
            await self._job.send(VocoderEnd(self._job.job_id))
        self._ready.set()

    def audio(self) -> AsyncGenerator[AudioDelta, None]:
        decoded = self._decoded()
        return decoded if self._startup_delays is None else self._startup_delays.delayed(decoded)

    async def _decoded(self) -> AsyncGenerator[AudioDelta, None]:
        await self._ready.wait()
        if not self._begun:
            return
        async for message, _ in self._job.events(VocoderDone):
            if isinstance(message, Pcm):
                self.audio_s += len(message.pcm) / (2 * OUTPUT_RATE_HZ)
                yield AudioDelta(message.pcm, tuple(message.spoken))
