"""Makes voices of recordings in the talker's stage, one at a time."""

import asyncio

from sglang_live.messages import MakeVoice, VoiceMade
from sglang_live.models.family import VoiceMaker
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.server import ServedJob


class VoiceMaking:
    def __init__(self, model: object):
        """model: the talker."""
        self._model = model
        self._busy = asyncio.Lock()

    async def run(self, job: ServedJob, request: MakeVoice) -> None:
        model, samples = self._model, wire.take(request.samples, job.frames)
        assert isinstance(model, VoiceMaker), "its facts say that it makes voices"
        async with self._busy:  # each takes a core
            speaker = await asyncio.to_thread(model.make_voice, samples)
        await job.send(VoiceMade(job.job_id, speaker.astype("<f4").tobytes()))
