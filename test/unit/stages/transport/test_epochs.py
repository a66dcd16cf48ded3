"""A session that goes on at another server: who has it, what ends, and what is refused."""

import asyncio

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_live.errors import StageFailedError
from sglang_live.messages import (
    CloseSession,
    Failed,
    Interrupt,
    TalkerRequest,
    ThinkerRequest,
    UserSpeaking,
)
from sglang_live.stages.transport.peers import (
    LOST_AFTER_TICKS,
    ForeignSessionError,
    Peers,
    StaleOwnerError,
    connection_name,
    new_run,
)
from test.unit.stages.transport.conftest import PATIENCE_S, Stage

SESSIONS = ("a", "b")
RUNS = tuple(new_run() for _ in range(3))
N_GUARDED = LOST_AFTER_TICKS - 1


class Owners(RuleBasedStateMachine):
    """Three servers, which take sessions over from one another, lag behind, and die.

    latest: the highest epoch of a session that a stage has seen of its present life.
    """

    def __init__(self):
        super().__init__()
        self.peers = Peers()
        self.owner: dict[str, tuple[str, int]] = {}
        self.latest: dict[str, int] = {}
        self.closed_for: dict[str, int] = {}
        self.names = {run: connection_name(run) for run in RUNS}
        self.silent = dict.fromkeys(RUNS, 0)
        for run in RUNS:
            self._says(run)

    def _says(self, run: str) -> bytes:
        self.peers.heard(self.names[run])
        self.silent[run] = 0
        return self.names[run]

    @rule(run=st.sampled_from(RUNS), session=st.sampled_from(SESSIONS), epoch=st.integers(0, 4))
    def opens(self, run, session, epoch):
        peer, owner = self._says(run), self.owner.get(session)
        latest = self.latest.get(session, 0)
        if epoch < latest:
            with pytest.raises(StaleOwnerError):
                self.peers.opens(peer, session, epoch)
        elif owner and owner[0] != run and owner[1] == epoch:
            with pytest.raises(ForeignSessionError):
                self.peers.opens(peer, session, epoch)
        else:
            takes_over = owner is not None and epoch > owner[1]
            assert self.peers.opens(peer, session, epoch) == takes_over
            self.owner[session] = run, epoch
            self.latest[session] = epoch
            self.closed_for.pop(session, None)

    @rule(run=st.sampled_from(RUNS), session=st.sampled_from(SESSIONS))
    def closes(self, run, session):
        """As StageServer does: only for a peer that may touch the session."""
        if self.peers.may_touch(self._says(run), session):
            self.peers.closes(session)
            self._closed(session)

    @rule()
    def time_passes(self):
        for session in [s for s, n in self.closed_for.items() if n == N_GUARDED]:
            del self.closed_for[session], self.latest[session]
        self.closed_for = {s: n + 1 for s, n in self.closed_for.items()}
        lost = {}
        for run in RUNS:
            self.silent[run] += 1
            if self.silent[run] == LOST_AFTER_TICKS:
                lost[self.names[run]] = [s for s, (r, _) in self.owner.items() if r == run]
        found = {peer: sorted(sessions) for peer, sessions in self.peers.tick()}
        assert found == {peer: sorted(sessions) for peer, sessions in lost.items()}
        for session in (s for sessions in lost.values() for s in sessions):
            self._closed(session)

    @rule(run=st.sampled_from(RUNS))
    def speaks(self, run):
        self._says(run)

    def _closed(self, session: str) -> None:
        _, epoch = self.owner.pop(session, (None, 0))
        if epoch > 1:
            self.closed_for[session] = 0
        elif session not in self.closed_for:
            self.latest.pop(session, None)

    @invariant()
    def only_the_latest_owner_may_touch_a_session(self):
        for session in SESSIONS:
            may = {run for run in RUNS if self.peers.may_touch(self.names[run], session)}
            owner = self.owner.get(session)
            assert may == ({owner[0]} if owner else {*RUNS})


TestOwners = Owners.TestCase


# --- over sockets ---


def think(session_id: str, epoch: int, job_id: str = "turn-think") -> ThinkerRequest:
    return ThinkerRequest(
        job_id,
        session_id=session_id,
        instructions="",
        keys=[],
        items=[],
        item_key="key",
        max_tokens=None,
        temperature=None,
        timeout_s=60.0,
        epoch=epoch,
    )


def speak(session_id: str, epoch: int) -> TalkerRequest:
    return TalkerRequest(
        "turn-speak",
        session_id=session_id,
        segment_keys=[],
        segments=[],
        voice="v",
        first_id=1,
        temperature=1.0,
        seed=1,
        timeout_s=60.0,
        epoch=epoch,
    )


async def refusal(peer, opener) -> str:
    async with peer.open(opener.job_id) as job:
        await job.begin(opener)
        with pytest.raises(StageFailedError) as failed:
            async for _ in job.events(Failed):
                pass
    return failed.value.reason


@pytest.mark.parametrize("interrupts", [True, False])
async def test_the_next_owner_gets_the_session_and_ends_the_jobs_of_the_one_before(
    tmp_path, interrupts
):
    interrupted: list[int] = []

    async def run(job):
        async for message in job.inputs():
            if isinstance(message, Interrupt):
                interrupted.append(job.opener.epoch)
                return

    stage = Stage(f"ipc://{tmp_path}/stage", run, interrupts=interrupts)
    try:
        first, second = stage.peer(), stage.peer()
        await first.send(think("s", 1))
        await first.send(speak("s", 1))
        await first.send(think("other", 1, "other-think"))
        await first.ping(PATIENCE_S)
        assert stage.server.n_jobs == 3
        assert await refusal(second, think("s", 1)) == "foreign_session"
        await second.send(think("s", 2))
        ended = ["turn-speak"] if interrupts else ["turn-speak", "turn-think"]
        await stage.until(lambda: sorted(stage.cancelled) == ended)
        # A turn of the thinker ends as an interrupted one: its session keeps the KV.
        await stage.until(lambda: interrupted == ([1] if interrupts else []))
        assert stage.server.n_taken_over == 1
        # The earlier owner still runs, and knows nothing of it.
        for opener in (think("s", 1), speak("s", 1)):
            assert await refusal(first, opener) == "stale_session_owner"
        for message in (CloseSession("s"), UserSpeaking("s")):
            await first.send(message)
        await first.ping(PATIENCE_S)
        assert stage.server.n_refused == 5
        assert not stage.closed_sessions and not stage.hints
        await second.send(CloseSession("s"))
        await stage.until(lambda: stage.closed_sessions == ["s"])
        assert await refusal(first, think("s", 1)) == "stale_session_owner"
    finally:
        await stage.close()


async def test_a_turn_whose_server_has_died_ends_with_its_kv(tmp_path):
    interrupted = asyncio.Event()

    async def run(job):
        async for message in job.inputs():
            if isinstance(message, Interrupt):
                interrupted.set()
                return
            await job.send(Failed("turn-think", "any", "message"))

    stage = Stage(f"ipc://{tmp_path}/stage", run, interrupts=True)
    try:
        first = stage.peer()
        await first.send(think("s", 1))
        await first.ping(PATIENCE_S)
        [job] = stage.server._jobs.values()
        await first.close()
        async with asyncio.timeout(PATIENCE_S):
            while not interrupted.is_set():
                await job.send(Failed(job.job_id, "any", "message"))
                await asyncio.sleep(0.01)
        assert not stage.cancelled
    finally:
        await stage.close()
