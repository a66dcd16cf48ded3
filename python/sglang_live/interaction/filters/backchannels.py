"""Whether a voice over a response may be only a back-channel ("mhm", "okay"), by its sound so far.

In: the audio of the voice so far. Out: how long it must last to be a turn.
Pure but for the question whether the response is about to end.

A listener's sound is short and has no hiss: it is hummed or is a vowel or two. Most turns have an
"s", "t" or "f" within their first 250 ms, which a hum never has. Such a voice is a turn as soon as
it is certain that it is a voice; any other one must outlast a back-channel.
"""

from collections.abc import Callable

from sglang_live.interaction.filters.side_talk import sound_of
from sglang_live.interaction.filters.voice_filter import Frame, Pcm, Scores, VoiceFilter
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import TurnDetection

# Voice for which a turn without hiss must last. Chosen, as the two below, on the recordings `tune`
# of benchmark.turn_taking.
OUTLAST_MS = 480
# A window hisses if it has as much energy above 2 kHz as below 1 kHz, ...
_HISS_DB = 0.0
# ... and is no softer than this beside the loudest one: a room hisses, too.
_RANGE_DB = 25.0
# A turn may begin with a hiss, which counts as no voice yet.
_BEFORE = 2 * WINDOW_SAMPLES


def begins_at(onset_sample: int) -> int:
    """Where the audio begins by which a voice is judged. onset_sample: its first voiced window."""
    return onset_sample - _BEFORE


def has_hiss(pcm: Pcm) -> bool:
    """pcm: [n] int16, 16 kHz, of a voice so far, from begins_at() on."""
    sound = sound_of(pcm)
    if not len(sound.power):
        return False
    loud = sound.power >= sound.power.max() * 10 ** (-_RANGE_DB / 10)
    return bool((sound.tilts_db[loud] >= _HISS_DB).any())


class Backchannels(VoiceFilter):
    def __init__(self, is_ending: Callable[[], bool]) -> None:
        """is_ending: whether the response is in its last moments: a short "yes" is an answer."""
        self._is_ending = is_ending

    def configure(self, detection: TurnDetection) -> bool:
        return detection.ignore_backchannels and detection.vad.confirm_ms > 0

    def outlast_ms(self, frame: Frame, scores: Scores, so_far_ms: int) -> int:
        if self._is_ending():
            return so_far_ms
        onset = frame.onset
        if onset is None:
            n_voiced = len(scores) - int((scores >= frame.threshold).argmax())
            onset = frame.end - n_voiced * WINDOW_SAMPLES
        is_turn = has_hiss(frame.buffer.peek(begins_at(onset), frame.end))
        return so_far_ms if is_turn else max(so_far_ms, OUTLAST_MS)
