"""What reaches a running turn from outside: the caller's voice, and the caller's ear.

In: interruptions and playback, from the session; frames, from the turn itself. Out: messages to
the stages that are at work. Never waits. Owner: one Steering per turn.
"""

from sglang_live.clock import Clock
from sglang_live.core import FRAME_S
from sglang_live.orchestrator.stage_jobs import OnNote, Speech, Thought, VoiceJob
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import FIRST_INTERRUPTS

# A stage assumes one second per second between two reports; less than this off is no news.
TOLERANCE_S = 2 * FRAME_S


class Steering:
    """
    Args:
        policies: of the server; without any, the stages are told nothing.
        interrupts: how often this caller interrupts, 0 to 1.
        on_note: told what the stages' policies do with the reply.
    """

    def __init__(
        self,
        policies: Policies,
        clock: Clock,
        interrupts: float = FIRST_INTERRUPTS,
        on_note: OnNote | None = None,
    ):
        self._on_note = on_note
        self._policies, self._clock, self._interrupts = policies, clock, interrupts
        self._jobs: tuple[Thought, Speech, VoiceJob] | None = None
        self._told: tuple[float, float] | None = None  # what the thinker was told last, and when
        self._is_heard = False  # somebody tells of the listener
        self.interrupted = False

    def take(self, thought: Thought, speech: Speech, voice: VoiceJob) -> None:
        self._jobs = thought, speech, voice
        if self._on_note is not None:
            thought.on_note = speech.on_note = self._on_note

    def interrupt(self) -> bool:
        """End the reply where it is; False if that is not possible here.

        The thinker finishes in its own time, because its KV stays. Nobody will hear the others.
        """
        if self._jobs is None or not self._policies.truncate:
            return False
        if not self.interrupted:
            self.interrupted = True
            thought, speech, voice = self._jobs
            thought.interrupt()
            speech.cancel()
            voice.cancel()
        return True

    def heard(self, heard_s: float, playing: bool, interrupts: float) -> None:
        """The listener is so far, and goes on by itself or not."""
        self._interrupts = interrupts
        if self._jobs is not None and self._policies:
            thought, speech, _ = self._jobs
            speech.report(heard_s, playing, interrupts)
            if self._told is not None:  # else the thinker's consumer has not begun
                self._is_heard = True
                thought.report(heard_s, playing, interrupts)

    def spoke(self, n_frames: int) -> None:
        """The talker has come so far with what the thinker wrote.

        It tells the thinker how urgent its tokens are as long as nobody knows of a listener: a
        talker that is itself ahead of the listener can wait for them.
        """
        if self._jobs is None or not self._policies or self._is_heard:
            return
        now_s, spoken_s = self._clock.now_s(), n_frames * FRAME_S
        if self._told is not None:
            told_s, told_at_s = self._told
            if abs(spoken_s - told_s - (now_s - told_at_s)) <= TOLERANCE_S:
                return
        self._told = spoken_s, now_s
        thought, _, _ = self._jobs
        thought.report(spoken_s, True, self._interrupts)
