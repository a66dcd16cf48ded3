"""One call: its parts, put together for any protocol.

In: a session of the orchestrator, the user's audio, what the protocol asks for.
Out: facts for the protocol's port; audio in the lanes.
Owner: one Call per connection. Its parts own the facts: Conversation the items, Responses the
responses, AudibleResponses their playback, TurnTaking the user's audio, SessionMonitor the record
of events.
"""

import asyncio
import logging
import time
from collections.abc import Mapping

from sglang_live.aio import close_all
from sglang_live.gateway.auth import ANONYMOUS
from sglang_live.gateway.call.conversation.changes import ConversationChanges
from sglang_live.gateway.call.conversation.conversation import Conversation
from sglang_live.gateway.call.ports import CallPort, Lanes
from sglang_live.gateway.call.responses.audible import AudibleResponses
from sglang_live.gateway.call.responses.responses import Responses
from sglang_live.gateway.call.responses.turn_runner import TurnRunner
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.gateway.call.turns.duplex_mode import DuplexMode
from sglang_live.gateway.call.turns.frame_mode import FrameMode
from sglang_live.gateway.call.turns.input_transcription import InputTranscription
from sglang_live.gateway.call.turns.turn_taking import TurnTaking
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.rate_limits import RateLimitStatus
from sglang_live.interaction.filters.backchannels import Backchannels
from sglang_live.interaction.filters.echo import EchoFilter
from sglang_live.interaction.filters.side_talk import SideTalk
from sglang_live.interaction.monitor import SessionMonitor
from sglang_live.interaction.timeline import Timeline
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)


class Call:
    def __init__(
        self,
        session: VoiceSession,
        config: SessionConfig,
        parts: GatewayParts,
        port: CallPort,
        lanes: Lanes,
        owner: str = ANONYMOUS,
        early_s: float | None = None,
        *,
        answers: bool = True,
    ):
        """
        Args:
            answers: False: turns are transcribed, and no response follows any of them.
            owner: of the client's key, for limits.
            early_s: the lanes send audio in step with its playback, each packet this long before
                it. None: as it is made.
        """
        self.session_id = session.session_id
        self._parts = parts
        self.port = port
        self._owner = owner
        self.outlives_drain = False
        sessions = parts.config.sessions
        self.conversation = Conversation(sessions.max_conversation_bytes, parts.item_budget)
        self._timeline = Timeline(
            session.session_id,
            began_s=parts.clock.now_s(),
            began_unix_s=time.time(),
            keeps=parts.config.timeline_dir is not None,
        )
        self._monitor = SessionMonitor(
            session, parts.clock, parts.metrics, self._timeline, parts.user_prior, early_s
        )
        echo = EchoFilter(parts.clock, parts.metrics, parts.echo_thread, early_s)
        self.audible = AudibleResponses(
            lanes, port, self.conversation, self._monitor, parts.metrics, echo
        )
        self.changes = ConversationChanges(self.conversation, port, parts.metrics)
        turn_runner = TurnRunner(parts, session, self.changes, self._monitor, owner, answers)
        self.responses = Responses(
            parts=parts,
            changes=self.changes,
            port=port,
            audible=self.audible,
            monitor=self._monitor,
            turn_runner=turn_runner,
            admit=self._admit,
        )
        self._transcripts = InputTranscription(
            parts, session, port, self.responses.past_first_audio, self._admit
        )
        self.turns = TurnTaking(
            config=config,
            parts=parts,
            changes=self.changes,
            responses=self.responses,
            frames=(DuplexMode if parts.orchestrator.duplex_s else FrameMode)(
                parts, turn_runner, port, self._admit
            ),
            transcripts=self._transcripts,
            # In the order in which they hear a voice.
            filters=(
                echo,
                Backchannels(self.audible.is_ending),
                *parts.other_voices(),
                SideTalk(),
            ),
            monitor=self._monitor,
            port=port,
        )

    @property
    def now_s(self) -> float:
        """On the clock of its playback."""
        return self._parts.clock.now_s()

    @property
    def at_work(self) -> bool:
        """Whether a response runs or plays."""
        return self.responses.at_work

    def leave(self) -> None:
        """The client has lost its socket: it neither hears nor says anything until come_back()."""
        self.turns.leave()
        self.audible.client_left()

    def come_back(self, heard_s: Mapping[str, float]) -> None:
        """heard_s: by response, what the client has heard; of others, what was heard before."""
        self.turns.come_back()
        self.audible.client_returned(heard_s)

    async def close(self) -> None:
        """Cancel all tasks and wait, within bounds, until they no longer use the session."""
        await close_all(
            self.turns.close,
            self._transcripts.close,
            self.responses.close,
            self._monitor.close,
            self.conversation.close,
        )
        if folder := self._parts.config.timeline_dir:
            try:
                await asyncio.to_thread(self._timeline.write, folder)
            except OSError as error:
                self._parts.metrics.timelines_lost.inc()
                log.warning("timeline_lost session=%s error=%s", self.session_id, error)

    def _admit(self) -> RateLimitStatus | None:
        """Count one more response. Raises DrainingError or RateLimitError."""
        if not self.outlives_drain:
            self._parts.drain.check()
        return self._parts.rate_limits.take_now(self._owner)
