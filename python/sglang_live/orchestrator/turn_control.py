"""Interruption and playback of a running turn.

In: interruptions and playback, from the session; codec frames, from the turn itself. Out: messages
to the turn's jobs. Never waits. Owner: one TurnControl per turn.
"""

import math
from collections.abc import Callable

from sglang_live.clock import Clock
from sglang_live.core import FRAME_S, BegunTurn
from sglang_live.orchestrator.stage_jobs import (
    OnStreamEvent,
    OwnVoiceJob,
    ScriptJob,
    TalkerJob,
    TextJob,
    ThinkerJob,
    VocoderJob,
)
from sglang_live.policy.policies import Policies

# Between two reports a stage assumes one second per second. Smaller errors are not corrected.
TOLERANCE_S = 2 * FRAME_S
# While a response is heard, reports are repeated: one that is too old counts as lost
# (bridge/stream_table.py).
REPORT_EVERY_S = 1.5
# The longest piece of text takes less than this to write and to read.
_VOICE_WAITS_BELOW_S = 2.0


class TurnControl:
    """
    Args:
        policies: of the server. Without any, nothing is reported to the stages.
        on_stream_event: called with what the stages' policies do with the turn's requests.
        on_call: called when the response goes on with a function call, at least once.
    """

    def __init__(
        self,
        policies: Policies,
        clock: Clock,
        on_stream_event: OnStreamEvent | None = None,
        on_call: Callable[[], None] | None = None,
    ):
        self._on_stream_event = on_stream_event
        self._on_call = on_call
        self._policies = policies
        self._clock = clock
        self._jobs: (
            tuple[ThinkerJob | ScriptJob, TalkerJob | TextJob | OwnVoiceJob, VocoderJob] | None
        ) = None
        # Seconds of speech that were reported to the thinker last, and when.
        self._reported: tuple[float, float] | None = None
        self._has_playback = False  # playback has been reported
        self.interrupted = False

    def attach(
        self,
        thinker: ThinkerJob | ScriptJob,
        talker: TalkerJob | TextJob | OwnVoiceJob,
        vocoder: VocoderJob,
    ) -> None:
        self._jobs = thinker, talker, vocoder
        if self._on_call is not None and isinstance(thinker, ThinkerJob):
            thinker.on_call = self._on_call
        for job in (thinker, talker):
            if self._on_stream_event is not None and isinstance(job, ThinkerJob | TalkerJob):
                job.on_stream_event = self._on_stream_event

    def begun(self, seed: int) -> BegunTurn:
        """What has come of the turn so far. seed: of its talker."""
        thinker, talker = self._jobs[:2] if self._jobs is not None else (None, None)
        ids, said = thinker.so_far if isinstance(thinker, ThinkerJob) else ((), "")
        begun = BegunTurn(ids=ids, said=said, seed=seed)
        return talker.added_to(begun) if isinstance(talker, TalkerJob) else begun

    @property
    def can_interrupt(self) -> bool:
        return self._jobs is not None and self._policies.truncate

    def interrupt(self) -> None:
        """End the response where it is, while can_interrupt.

        The thinker ends its request by itself, so that its KV is kept; talker and vocoder are
        cancelled, because their audio is not heard.
        """
        assert self._jobs is not None
        self.interrupted = True
        thinker, talker, vocoder = self._jobs
        thinker.interrupt()
        talker.cancel()
        vocoder.cancel()

    def heard(self, heard_s: float, playing: bool, speed: float = 1.0) -> None:
        """Report playback to thinker and talker (see VoiceSession.report_playback)."""
        if self._jobs is None or not self._policies:
            return
        thinker, talker, vocoder = self._jobs
        talker.report(heard_s, playing, speed)
        if isinstance(talker, TextJob):
            # The voice reads whole pieces of text: when it has little sound left it waits for the
            # end of one, however much text it already has.
            waits = (vocoder.audio_s - heard_s) / speed < _VOICE_WAITS_BELOW_S
            thinker.report(math.inf if waits else heard_s, playing, speed)
        elif isinstance(talker, OwnVoiceJob) or self._reported is not None:
            # The thinker's consumer has begun.
            self._has_playback = True
            thinker.report(heard_s, playing, speed)

    def frames_came(self, n_frames: int) -> None:
        """Report the talker's progress to the thinker, until playback is reported.

        A talker that is ahead of its own consumer can wait for text; before there is playback, its
        own progress is all that says how urgent text is. Without a talker there is none.
        """
        if self._jobs is None or not self._policies or self._has_playback:
            return
        if isinstance(self._jobs[1], TextJob | OwnVoiceJob):
            return
        spoken_s = n_frames * FRAME_S
        now_s = self._clock.now_s()
        if self._reported is not None:
            reported_s, at_s = self._reported
            passed_s = now_s - at_s
            if passed_s < REPORT_EVERY_S and abs(spoken_s - reported_s - passed_s) <= TOLERANCE_S:
                return
        self._reported = spoken_s, now_s
        thinker, _, _ = self._jobs
        thinker.report(spoken_s, True)
