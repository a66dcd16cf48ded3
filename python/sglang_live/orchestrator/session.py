"""The orchestrator as the gateway uses it."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from sglang_live.capacity.best_effort import BestEffort
from sglang_live.capacity.control import Capacity
from sglang_live.core import PromptContent, PromptSize, TurnEvent, TurnRequest
from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.speculation import Refusal


class VoiceSession(Protocol):
    """One user's session: it stays with one replica of every stage, and keeps its KV between
    turns. Methods that are not coroutines never block."""

    session_id: str

    def respond(self, turn: TurnRequest) -> AsyncGenerator[TurnEvent, None]:
        """Run one turn. Ends with TurnDone, or raises LiveError.

        Closing the iterator early cancels the turn in every stage; the session stays usable.
        At most one turn that is not `stateless` may run at a time.
        """
        ...

    def watch(self, on_stream_event: Callable[[str, str, float], None]) -> None:
        """Report what the stages' policies do with the requests of the running turn.

        Args:
            on_stream_event: called with the stage; with "u0", "u1", "u2" or "unknown", the new
                urgency class of its request, or with "paused" or "resumed"; and with the seconds of
                speech by which it was ahead of its consumer.
        """
        ...

    def interrupt(self) -> bool:
        """End the running turn early; its iterator soon yields TurnDone("interrupted").

        The session keeps the KV of what was generated. Returns False if no such turn runs, or if
        the server runs without that policy: then the iterator has to be closed instead.
        """
        ...

    def speculation_refused(self) -> Refusal:
        """Why a speculative turn may not begin now; "" if it may."""
        ...

    def end_speculation(self, *, confirmed: bool) -> None:
        """Report, once, that the latest speculative turn has become the response, or never will.
        No effect on a turn that is not speculative. It may still run, or have ended."""
        ...

    def report_playback(self, heard_s: float, playing: bool, interrupts: float) -> None:
        """Report how far the playback of the running turn is.

        Args:
            heard_s: seconds of its audio that were heard.
            playing: whether playback advances by itself. Between two reports the stages assume
                that it then does so by one second per second.
            interrupts: the share of responses that this user interrupts, 0 to 1.
        """
        ...

    def report_underrun(self, silent_s: float) -> None:
        """Report a gap of silent_s within a response, caused by stages that were late."""
        ...

    def prefill_turn(self, turn: TurnRequest) -> bool:
        """Prefill the utterance so far in the background, while the user still speaks; with
        `preheat` the history alone, if its KV is lost.

        Requests with a deadline go first. The next turn waits for its end.

        Returns:
            False if a turn or another turn prefill runs, or if the thinker of a preheat is down.
        """
        ...

    def join_frames(self, frame_s: float) -> float:
        """Begin frame mode with a frame every frame_s.

        Returns:
            The duration of the first frame, chosen so that the frames of all sessions are spread.
        """
        ...

    def leave_frames(self) -> None:
        """End frame mode. Without it, nothing happens."""
        ...

    def report_speech(self, speaks: bool = True) -> None:
        """Report that the user has begun to speak.

        Args:
            speaks: False: what seemed to be speech was none.
        """
        ...

    def report_next_use(
        self, to_play_s: float, response_gap_s: float | None, observed_gap_s: float | None
    ) -> None:
        """Report when the user will speak again, as far as known: see messages.NextUseHint."""
        ...

    async def close(self) -> None:
        """Free everything that the session holds in any stage. Idempotent."""
        ...


class Orchestrator(Protocol):
    model_name: str
    voices: tuple[str, ...]

    async def open_session(self, session_id: str, *, admitted: bool = True) -> VoiceSession:
        """Open a session.

        Args:
            admitted: False: it does not count as a session, and is not refused when these are as
                many as can be served. The gateway bounds the number of such sessions.
        Raises:
            CapacityError: the server is full.
            StageUnavailableError: a stage is down.
        """
        ...

    def capacity_now(self) -> Capacity:
        """How many more sessions may come."""
        ...

    def best_effort_now(self) -> BestEffort | None:
        """What the engines say of best-effort work; None: nothing."""
        ...

    async def measure(self, content: PromptContent) -> PromptSize | None:
        """The length of a prompt with this content. None: so short that it fits in any case.

        Raises:
            StageUnavailableError, StageFailedError, DeadlineError: no thinker could count it.
        """
        ...

    async def retain_native(self, session_id: str, retention: RetentionConfig) -> None:
        """Bound a streaming session that was opened over SGLang's own API.

        On return the bound holds: requests that are sent from now on run under it.

        Args:
            retention: with a number of sink tokens.
        Raises:
            StageUnavailableError, StageFailedError: it is not known whether the bound holds.
        """
        ...
