"""Whether a voice over a response may be only a back-channel ("mhm", "okay"), by its sound so far.

In: the audio of the voice so far. Out: how long it must last to be a turn.
Pure.

A listener's sound is short and has no hiss: it is hummed or is a vowel or two. Most turns have an
"s", "t" or "f" within their first 250 ms, which a hum never has. Such a voice is a turn as soon as
it is certain that it is a voice; any other one must outlast a back-channel.
"""

import numpy as np
import numpy.typing as npt

from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.user_voice import sound_of

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


def has_hiss(pcm: npt.NDArray[np.int16]) -> bool:
    """pcm: [n] int16, 16 kHz, of a voice so far, from begins_at() on."""
    sound = sound_of(pcm)
    if not len(sound.power):
        return False
    loud = sound.power >= sound.power.max() * 10 ** (-_RANGE_DB / 10)
    return bool((sound.tilts_db[loud] >= _HISS_DB).any())
