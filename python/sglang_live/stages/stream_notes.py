"""What an engine's policies did with single replies, on its way to those who asked for them.

Owner: one NoteRoutes per stage. Notes of requests that nobody waits for any more are dropped.
"""

from sglang_live.engine_channel.messages import StreamNotes
from sglang_live.messages import StreamNote
from sglang_live.stages.transport.server import ServedJob


class NoteRoutes:
    def __init__(self) -> None:
        self._jobs: dict[str, ServedJob] = {}

    def add(self, rid: str, job: ServedJob) -> None:
        self._jobs[rid] = job

    def remove(self, rid: str) -> None:
        self._jobs.pop(rid, None)

    def tell(self, notes: StreamNotes) -> None:
        for rid, what, ahead_s in zip(notes.rids, notes.what, notes.ahead_s, strict=True):
            if (job := self._jobs.get(rid)) is not None:
                job.post(StreamNote(job.job_id, what, ahead_s))
