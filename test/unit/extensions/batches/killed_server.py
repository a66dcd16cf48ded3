"""A gateway with batches and a fake model in a process of its own: `python -m … FOLDER PORT`.

Every spoken text takes a tenth of a second.
"""

import asyncio
import sys
from pathlib import Path

import uvicorn

from sglang_live.core import TurnRequest
from sglang_live.extensions.batches.config import BatchConfig
from sglang_live.extensions.batches.store import Store
from test.unit.extensions.batches.batches import app_with
from test.unit.gateway.fakes import FakeOrchestrator, FakeSession


class SlowSession(FakeSession):
    async def respond(self, turn: TurnRequest):
        await asyncio.sleep(0.1)
        async for event in super().respond(turn):
            yield event


class SlowOrchestrator(FakeOrchestrator):
    async def open_session(self, session_id: str, *, admitted: bool = True) -> FakeSession:
        return SlowSession(session_id, self.scripts)


if __name__ == "__main__":
    store = Store(Path(sys.argv[1]), BatchConfig(at_once=3))
    app = app_with(SlowOrchestrator(n_more=16), store)
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
