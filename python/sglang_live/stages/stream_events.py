"""What an engine's policies did with single replies, on its way to those who asked for them.

Owner: one NoteRoutes per stage. Notes of requests that nobody waits for any more are dropped.
"""

from sglang_live.engine_channel.messages import StreamEvents
from sglang_live.messages import StreamEvent
from sglang_live.stages.transport.server import ServedJob


class NoteRoutes:
    def __init__(self) -> None:
        self._jobs: dict[str, ServedJob] = {}

    def add(self, rid: str, job: ServedJob) -> None:
        self._jobs[rid] = job

    def remove(self, rid: str) -> None:
        self._jobs.pop(rid, None)

    def tell(self, notes: StreamEvents) -> None:
        for rid, what, buffered_s in zip(notes.rids, notes.what, notes.buffered_s, strict=True):
            if (job := self._jobs.get(rid)) is not None:
                job.post(StreamEvent(job.job_id, what, buffered_s))
