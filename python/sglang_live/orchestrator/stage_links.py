"""A session's links to its replica of every stage, and the items that each replica has.

A link whose replica is replaced knows of no items: the new one is sent the whole history. It may
be replaced during a turn, if there is a `move` for the turn's jobs (moves.py).
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from sglang_live import ids
from sglang_live.core import HistoryItem, PromptContent, TurnRequest
from sglang_live.errors import StageUnavailableError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import (
    CloseSession,
    MakeVoice,
    MeasurePrompt,
    NativeRetained,
    PromptMeasured,
    RetainNative,
    SessionHint,
    VoiceMade,
)
from sglang_live.orchestrator.moves import NO_MOVE, MovableJob, Move
from sglang_live.orchestrator.stage_jobs import (
    JOB_TIMEOUT_S,
    OwnVoiceJob,
    ScriptJob,
    Segment,
    TalkerJob,
    TextJob,
    ThinkerJob,
    VocoderJob,
)
from sglang_live.orchestrator.startup_delay import StartupDelays
from sglang_live.stages.supervisor import Replica
from sglang_live.stages.transport.client import StageClient

# The client's next event waits for the answer.
_MEASURE_TIMEOUT_S = 10.0
# Voices are made one after the other; each takes seconds of a core.
_VOICE_TIMEOUT_S = 60.0


def _client_of(replica: Replica) -> StageClient:
    """Raises StageUnavailableError while the replica is down."""
    if replica.client is None or not replica.is_up:
        raise StageUnavailableError(f"{replica.spec.name} is {replica.state}", retry_after_s=10)
    return replica.client


@dataclass(slots=True)
class _Link:
    """known: keys of items that the stage process has. Empty again with each new process."""

    replica: Replica
    session_id: str
    epoch: int = 0
    known: set[str] = field(default_factory=set)
    _client: StageClient | None = None

    def client(self) -> StageClient:
        """Raises StageUnavailableError while the replica is down."""
        client = _client_of(self.replica)
        if client is not self._client:
            self._client = client
            self.known = set()
        return client

    def expect(self, keys: set[str]) -> None:
        """The stage may have these items."""
        with suppress(StageUnavailableError):
            self.client()
            self.known |= keys

    def hint(self, hint: SessionHint) -> None:
        if client := self._running_client():
            client.send_later(hint)

    def close(self) -> None:
        if client := self._running_client():
            client.send_later(CloseSession(self.session_id))
        elif self._client is not None:
            self.replica.close_session(self.session_id)
        self._client = None

    def lead_to(self, replica: Replica) -> None:
        """Later jobs run there. Where they ran before, the session is closed."""
        if replica is not self.replica:
            self.close()
            self.replica = replica

    def _running_client(self) -> StageClient | None:
        """The client, if the stage process that has jobs or items of this session still runs."""
        client = self._client
        is_it = client is not None and client is self.replica.client and not client.is_down
        return client if is_it else None


@dataclass(slots=True)
class ThinkerLink(_Link):
    """segments: user messages for the talker, shared with the session's TalkerLink."""

    segments: dict[str, Segment] = field(default_factory=dict)

    @asynccontextmanager
    async def open(self, turn: TurnRequest, move: Move = NO_MOVE) -> AsyncIterator[ThinkerJob]:
        work = ids.THINK if turn.frame_s is None else ids.FRAME
        async with MovableJob(self, ids.job_of(turn.turn_id, work), move) as job:
            yield ThinkerJob(job, turn, self.session_id, self.segments, self.epoch)


class ScriptLink:
    """In the place of a ThinkerLink. segments: none, because its talker reads text."""

    def __init__(self) -> None:
        self.segments: dict[str, Segment] = {}

    @asynccontextmanager
    async def open(self, turn: TurnRequest, move: Move = NO_MOVE) -> AsyncIterator[ScriptJob]:
        yield ScriptJob(turn)

    def hint(self, hint: SessionHint) -> None:
        """No stage has this session."""

    def close(self) -> None:
        """No stage holds anything."""


@dataclass(slots=True)
class TalkerLink(_Link):
    """reads_text: see TalkerJob."""

    segments: dict[str, Segment] = field(default_factory=dict)
    reads_text: bool = False

    @asynccontextmanager
    async def open(self, turn: TurnRequest, move: Move = NO_MOVE) -> AsyncIterator[TalkerJob]:
        async with MovableJob(self, ids.job_of(turn.turn_id, ids.SPEAK), move) as job:
            shared = self.session_id, self.segments, self.epoch
            yield TalkerJob(job, turn, *shared, reads_text=self.reads_text)


@dataclass(slots=True)
class NoTalkerLink:
    """In the place of a TalkerLink, for a model without a talker. own_voice: see ModelFacts."""

    own_voice: bool = False

    @asynccontextmanager
    async def open(
        self, turn: TurnRequest, move: Move = NO_MOVE
    ) -> AsyncIterator[TextJob | OwnVoiceJob]:
        yield OwnVoiceJob(turn) if self.own_voice else TextJob(turn)

    def close(self) -> None:
        """No stage holds anything."""


@dataclass(slots=True)
class VocoderLink(_Link):
    startup_delays: StartupDelays | None = None

    @asynccontextmanager
    async def open(self, turn: TurnRequest, move: Move = NO_MOVE) -> AsyncIterator[VocoderJob]:
        async with MovableJob(self, ids.job_of(turn.turn_id, ids.VOICE), move) as job:
            yield VocoderJob(job, turn, self.startup_delays if not turn.flex else None)


@dataclass(frozen=True, slots=True)
class StageLinks:
    thinker: ThinkerLink | ScriptLink
    talker: TalkerLink | NoTalkerLink
    vocoder: VocoderLink

    @staticmethod
    def to(
        replicas: dict[str, Replica],
        session_id: str,
        startup_delays: StartupDelays | None = None,
        talker_reads_text: bool = False,
        epoch: int = 0,
        own_voice: bool = False,
    ) -> "StageLinks":
        """
        Args:
            replicas: by stage; a model may have no thinker, or no talker.
            session_id: "" for the links of a stateless turn.
            startup_delays: None: audio is never withheld.
            talker_reads_text, own_voice: see ModelFacts.
            epoch: see VoiceSession.
        """
        thinks, speaks = replicas.get("thinker"), replicas.get("talker")
        thinker: ThinkerLink | ScriptLink = ScriptLink()
        if thinks:
            thinker = ThinkerLink(thinks, session_id, epoch)
        talker: TalkerLink | NoTalkerLink = NoTalkerLink(own_voice)
        if speaks:
            talker = TalkerLink(
                speaks, session_id, epoch, segments=thinker.segments, reads_text=talker_reads_text
            )
        vocoder = VocoderLink(replicas["vocoder"], session_id, startup_delays=startup_delays)
        return StageLinks(thinker, talker, vocoder)

    def to_replicas(self, replicas: Mapping[str, Replica], *, if_lost: bool = False) -> None:
        """Later jobs run in these replicas, by stage.

        if_lost: only those whose replica is down; in others a job of these links may run.
        """
        for link in (self.thinker, self.talker, self.vocoder):
            if isinstance(link, _Link) and not (if_lost and link.replica.is_up):
                link.lead_to(replicas[link.replica.spec.stage])

    def expect(self, history: Iterable[HistoryItem]) -> None:
        """The stages may have these items, of a server that had the session before."""
        keys = {item.key: item.role == "user" and item.token_ids is None for item in history}
        if isinstance(self.thinker, ThinkerLink):
            self.thinker.expect({*keys})
        if isinstance(self.talker, TalkerLink):
            self.talker.expect({key for key, is_heard in keys.items() if is_heard})

    def forget_deleted(self, turn: TurnRequest) -> None:
        """Drop the segments of messages that are no longer in the conversation."""
        segments = self.thinker.segments
        for key in segments.keys() - {item.key for item in turn.history}:
            del segments[key]

    def close(self) -> None:
        for link in (self.thinker, self.talker, self.vocoder):
            link.close()


# --- what is asked of a stage outside of turns ---


async def retain_native(replica: Replica, session_id: str, retention: RetentionConfig) -> None:
    """Return when the bound of a session of SGLang's own API holds.

    retention: with a number of sink tokens.
    """
    assert retention.sink_tokens is not None
    async with _client_of(replica).open(ids.new_job("bound")) as job:
        await job.begin(
            RetainNative(
                job.job_id,
                session_id=session_id,
                sink_tokens=retention.sink_tokens,
                window_tokens=retention.window_tokens,
                slack_tokens=retention.slack_tokens,
                timeout_s=JOB_TIMEOUT_S,
            )
        )
        async for _ in job.events(NativeRetained):
            pass


async def measure_prompt(replica: Replica, content: PromptContent) -> PromptMeasured:
    async with _client_of(replica).open(ids.new_job("measure")) as job:
        await job.begin(
            MeasurePrompt(
                job.job_id,
                instructions=content.instructions,
                functions=list(content.functions),
                texts=list(content.texts),
                clips_s=list(content.clips_s),
                timeout_s=_MEASURE_TIMEOUT_S,
                picture_tokens=content.picture_tokens,
            )
        )
        events = job.events(PromptMeasured, silence_limit_s=_MEASURE_TIMEOUT_S)
        [(measured, _)] = [event async for event in events]
        assert isinstance(measured, PromptMeasured)
        return measured


async def make_voice(replica: Replica, samples: np.ndarray) -> bytes:
    """See Orchestrator.make_voice."""
    async with _client_of(replica).open(ids.new_job("voice")) as job:
        tensors = job.tensors()
        begin = MakeVoice(job.job_id, tensors.put(samples), timeout_s=_VOICE_TIMEOUT_S)
        await job.begin(begin, tensors)
        events = job.events(VoiceMade, silence_limit_s=_VOICE_TIMEOUT_S)
        [(made, _)] = [event async for event in events]
        assert isinstance(made, VoiceMade)
        return made.speaker
