"""Passes on what an engine's policies did with single requests, to the jobs of these.

In: StreamEvents of the engine. Out: StreamEvent messages. Those of ended jobs are dropped.
Owner: one StreamEventRoutes per stage.
"""

from sglang_live.engine_channel.messages import StreamEvents
from sglang_live.messages import StreamEvent
from sglang_live.stages.transport.server import ServedJob


class StreamEventRoutes:
    def __init__(self) -> None:
        self._jobs: dict[str, ServedJob] = {}

    def add(self, rid: str, job: ServedJob) -> None:
        self._jobs[rid] = job

    def remove(self, rid: str) -> None:
        self._jobs.pop(rid, None)

    def pass_on(self, events: StreamEvents) -> None:
        for rid, what, buffered_s in zip(events.rids, events.what, events.buffered_s, strict=True):
            if (job := self._jobs.get(rid)) is not None:
                job.post(StreamEvent(job.job_id, what, buffered_s))
