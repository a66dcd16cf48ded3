"""The orchestrator as its callers see it."""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from sglang_live.capacity.control import Capacity
from sglang_live.core import PromptContent, PromptSize, TurnEvent, TurnRequest
from sglang_live.kv.retention import RetentionConfig


class VoiceSession(Protocol):
    """One caller's conversation: sticky to one replica of every stage, KV kept between turns."""

    session_id: str

    def respond(self, turn: TurnRequest) -> AsyncIterator[TurnEvent]:
        """Run one turn. Ends with TurnDone, or raises LiveError.

        Closing the iterator early cancels the turn in every stage; the session stays usable.
        At most one turn that is not `stateless` may run at a time.
        """
        ...

    def watch(self, on_note: Callable[[str, str, float], None]) -> None:
        """Have on_note told what the stages' policies do with the running turn's reply.

        Its arguments: the stage; "u0", "u1", "u2" or "unknown", the urgency class it is in from
        now on, or "held", "resumed"; and by how many seconds it was ahead.
        """
        ...

    def interrupt(self) -> bool:
        """End the running turn early; its iterator soon yields TurnDone("interrupted").

        The session keeps the KV of what was generated. False if there is no such turn, or the
        server runs without that policy: then closing the iterator is the way.
        """
        ...

    def report_playback(self, heard_s: float, playing: bool, interrupts: float) -> None:
        """How much of the running turn's audio was heard, whether playback goes on by itself at
        this moment, and how often this caller interrupts (0 to 1). Never blocks; what the stages
        assume between two reports is one second per second while playing.
        """
        ...

    def report_underrun(self, silent_s: float) -> None:
        """In the middle of an answer the listener had nothing to hear for so long, because the
        stages had delivered nothing."""
        ...

    def prefill_turn(self, turn: TurnRequest) -> bool:
        """While the caller still speaks: have the thinker take in what this turn's history holds,
        in the background and after everybody who waits for something. Never blocks.

        The next turn waits for the end of it. False: not now, because a turn runs or the last such
        request does.
        """
        ...

    def join_frames(self, frame_s: float) -> float:
        """The caller will be heard every frame_s. Returns how long the first frame should be, so
        that callers' beats are spread."""
        ...

    def leave_frames(self) -> None:
        """No longer. Nothing happens if there was no beat."""
        ...

    def report_speech(self) -> None:
        """The caller has begun to speak. Never blocks."""
        ...

    def report_next_use(
        self, buffered_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """When the caller will speak again, as far as can be told. Never blocks.

        buffered_s: until the listener will have heard all that was sent so far; 0: silence now.
        response_gap_s: from the end of playback to this caller's next word, on average; None before
            the first. observed_gap_s: one that was seen just now.
        """
        ...

    async def close(self) -> None:
        """Free everything the session holds in any stage. Safe to call twice."""
        ...


class Orchestrator(Protocol):
    model_name: str
    voices: tuple[str, ...]

    async def open_session(self, session_id: str) -> VoiceSession:
        """Raises CapacityError when full, StageUnavailableError while a stage is down."""
        ...

    def capacity_now(self) -> Capacity:
        """How many more sessions may come."""
        ...

    async def measure(self, content: PromptContent) -> PromptSize | None:
        """How long a prompt with this would be; None: so short that it fits in any case.

        Raises:
            StageUnavailableError, StageFailedError, DeadlineError: not known.
        """
        ...

    async def retain_native(self, session_id: str, retention: RetentionConfig) -> None:
        """Bound a streaming session that was opened over SGLang's own API.

        On return the bound is in force: requests that are sent from now on run under it.

        Args:
            retention: with a number of sink tokens.
        Raises:
            StageUnavailableError, StageFailedError: nobody knows whether the session is bounded.
        """
        ...
