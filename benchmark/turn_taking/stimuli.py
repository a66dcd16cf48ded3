"""What a microphone hears while the agent speaks: users, listeners, noises, the agent itself.

Voices are recordings. A noise whose name ends in `_synthetic` is computed from its name.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from benchmark.turn_taking import sounds
from benchmark.turn_taking.clips import Clip, split_of
from benchmark.turn_taking.cutting import backchannels_of, beginnings_of
from benchmark.turn_taking.timeline import Span, Stimulus
from sglang_live.core import INPUT_RATE_HZ

INTERRUPTION, BACKCHANNEL, SIDE_TALK = "interruption", "backchannel", "side_talk"
OVER_ECHO = "interruption_over_echo"
# The client's echo canceller leaves the user alone, while the server knows what is played.
ECHO_CANCELLED = "interruption_echo_cancelled"
# As loud beside the meeting's turns as it was; the other ones are as loud as a turn.
SOFT_BACKCHANNEL = "backchannel_at_its_level"
# Of people who talk with each other, as the back-channels are.
IN_MEETING = "interruption_in_a_meeting"
# A sound from the beginning of a turn to a soft moment: about a word, as "stop" is.
WORD = "interruption_of_a_word"
TELEVISION, SECOND_SPEAKER = "television", "second_speaker"
ECHO_DB = (-10, -20, -30)
ECHO_DELAYS_MS = (20, 100, 200, 400)
_OVER_ECHO = -20.0, 100.0
# Direct sound over the reverberation of a room, both computed.
ROOM_DB, ROOM_DELAY_MS = 6.0, 100

_ONSET_MS = 1000.0
_LASTS_MS = 3000.0
_AFTER_MS = 1000.0
# A shorter clip is not a turn that interrupts.
_LEAST_MS = 1500.0
_TURN_MS = 1000.0
_N_SYNTHETIC = 20
# A person at the other end of the room: weaker, without high frequencies.
_SIDE_DB, _SIDE_TAPS = -15.0, 8
# A loudspeaker across the room: all frequencies, more of the room than of the loudspeaker.
_TELEVISION_DB, _TELEVISION_DIRECT_DB = -10.0, -3.0
_WORD_MS = 250.0, 500.0
# A user who has gone some metres away; one who also speaks to the wall.
_SOFTER_DB, _ACROSS_DB, _ACROSS_DIRECT_DB, _AWAY_DB, _AWAY_TAPS = -12.0, -6.0, 3.0, -8.0, 4
_TELEPHONE_HZ = 300.0, 3400.0
_LOWER = 1.05

_SYNTHETIC: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "keyboard_synthetic": sounds.keyboard,
    "music_synthetic": sounds.music,
    "cough_synthetic": sounds.cough,
}


def stimuli(clips: Sequence[Clip], split: str) -> list[Stimulus]:
    """All stimuli of the groups of a split."""
    own = [clip for clip in clips if split_of(clip.group) == split]
    long = long_clips(own)
    return [
        *voices(clips, split),
        *over_echo(long),
        *(_noise(clip) for clip in own if clip.kind in ("noise", "music", "music+vocals")),
        *_synthetic(split),
        *_echoes(long),
    ]


def voices(clips: Sequence[Clip], split: str) -> list[Stimulus]:
    """Those of people, without the agent's sound."""
    own = [clip for clip in clips if split_of(clip.group) == split]
    long = long_clips(own)
    return [
        *map(_interruption, long),
        *map(_word, long),
        *(found for clip in own for found in _from_meeting(clip)),
        *_others(long, SIDE_TALK, _side_talk),
        *_others(long, TELEVISION, _television),
    ]


def long_clips(clips: Sequence[Clip]) -> list[Clip]:
    least = sounds.samples(_LEAST_MS)
    return [clip for clip in clips if clip.kind == "speech" and len(clip.pcm) >= least]


def _heard(pcm: np.ndarray, tone: np.ndarray) -> np.ndarray:
    """The room, then the sound, then the room again."""
    return np.concatenate(
        (
            sounds.lasting(tone, sounds.samples(_ONSET_MS)),
            pcm,
            sounds.lasting(tone, sounds.samples(_AFTER_MS)),
        )
    )


def _voice(clip: Clip, db: float = sounds.NEAR_DB) -> np.ndarray:
    """The clip's first seconds from its first sound on."""
    start = sounds.samples(sounds.sounding(clip.pcm)[0].start_ms)
    return sounds.at_level(clip.pcm[start : start + sounds.samples(_LASTS_MS)], db)


def _tone(clip: Clip) -> np.ndarray:
    """The clip's room, as much softer or louder as its voice is made."""
    tone, db = sounds.room_tone(clip.pcm, clip.name), sounds.level_db(clip.pcm)
    return sounds.at_level(tone, sounds.level_db(tone) + sounds.NEAR_DB - db)


def _interruption(clip: Clip) -> Stimulus:
    pcm = _heard(_voice(clip), _tone(clip))
    return Stimulus(clip.name, clip.group, INTERRUPTION, pcm, _ONSET_MS, earlier=_earlier(clip))


def _earlier(clip: Clip) -> np.ndarray:
    """A turn of the clip's speaker: its end, which no stimulus but of a short clip begins with."""
    return sounds.at_level(clip.pcm[-sounds.samples(_LASTS_MS) :], sounds.NEAR_DB)


def _word(clip: Clip) -> Stimulus:
    voice = _voice(clip)
    first, last = _WORD_MS
    levels = sounds.frame_levels(voice[sounds.samples(first) : sounds.samples(last)])
    word = voice[: sounds.samples(first + 10 * float(np.argmin(levels)))]
    pcm = _heard(word, _tone(clip))
    return Stimulus(clip.name, clip.group, WORD, pcm, _ONSET_MS, earlier=_earlier(clip))


def over_echo(clips: Sequence[Clip]) -> Iterable[Stimulus]:
    """Each voice interrupts an agent that speaks with the voice of the next group."""
    for number, clip in enumerate(clips):
        others = [c for c in (*clips[number:], *clips[:number]) if c.group != clip.group]
        if others:
            user = _heard(_voice(clip), _tone(clip))
            playing = _spoken(others[0], len(user))
            pcm = sounds.mixed(user, sounds.echo(playing, *_OVER_ECHO))
            known = clip.name, clip.group
            before = _earlier(clip)
            yield Stimulus(*known, OVER_ECHO, pcm, _ONSET_MS, playing, before)
            yield Stimulus(*known, ECHO_CANCELLED, user, _ONSET_MS, playing, before)


def _spoken(clip: Clip, n: int) -> np.ndarray:
    """The clip over and over, as the agent's speech."""
    return sounds.at_level(np.tile(clip.pcm, -(-n // len(clip.pcm)))[:n], sounds.NEAR_DB)


def _from_meeting(clip: Clip) -> Iterable[Stimulus]:
    """Back-channels and beginnings of turns, in a session of all the meeting's speakers."""
    long = [s for s in clip.units if s.end_ms - s.start_ms >= _TURN_MS]
    parts = [clip.pcm[sounds.samples(s.start_ms) : sounds.samples(s.end_ms)] for s in long]
    turn = np.concatenate(parts) if parts else clip.pcm
    for speaker, span in backchannels_of(clip.units, alone=True):
        yield _of_meeting(clip, speaker, span, BACKCHANNEL, turn)
        yield _of_meeting(clip, speaker, span, SOFT_BACKCHANNEL, turn, sounds.level_db(turn))
    for speaker, span in beginnings_of(clip.units, _LEAST_MS):
        yield _of_meeting(clip, speaker, span, IN_MEETING, turn, sounds.level_db(turn))


def _of_meeting(
    clip: Clip,
    speaker: str,
    span: Span,
    kind: str,
    turn: np.ndarray,
    turn_db: float | None = None,
) -> Stimulus:
    """
    Args:
        turn: of the meeting, by any speaker: most speakers of back-channels have none alone.
        turn_db: its level, beside which the sound is as loud as in the meeting; None: the sound is
            made as loud as a turn.
    """
    pcm = clip.pcm[sounds.samples(span.start_ms) : sounds.samples(span.end_ms)]
    gain_db = sounds.NEAR_DB - (sounds.level_db(pcm) if turn_db is None else turn_db)
    tone = sounds.room_tone(clip.pcm, clip.name)
    heard = _heard(sounds.louder(pcm, gain_db), sounds.louder(tone, gain_db))
    earlier = sounds.at_level(turn, sounds.NEAR_DB)
    name = f"{clip.name}/{speaker}/{span.start_ms:.0f}"
    return Stimulus(name, clip.group, kind, heard, _ONSET_MS, earlier=earlier)


def _others(
    clips: Sequence[Clip], kind: str, make: Callable[[Clip], np.ndarray]
) -> Iterable[Stimulus]:
    """Each voice from elsewhere in the room, in a session of the next group's speaker."""
    for number, clip in enumerate(clips):
        users = [c for c in (*clips[number:], *clips[:number]) if c.group != clip.group]
        earlier = _earlier(users[0]) if users else None
        pcm = _heard(make(clip), sounds.soft_noise(clip.name))
        yield Stimulus(clip.name, clip.group, kind, pcm, _ONSET_MS, earlier=earlier)


def of_other_people(clips: Sequence[Clip], split: str) -> list[Stimulus]:
    """A television and a second speaker beside the microphone, in a session of each other user."""
    long = long_clips([clip for clip in clips if split_of(clip.group) == split])
    found = []
    for kind, make in ((TELEVISION, _television), (SECOND_SPEAKER, _voice)):
        for clip in long:
            users = {c.group: c for c in long if c.group != clip.group}
            for group, user in users.items():
                pcm = _heard(make(clip), sounds.soft_noise(clip.name))
                name, earlier = f"{clip.name} for {group}", _earlier(user)
                found.append(Stimulus(name, clip.group, kind, pcm, _ONSET_MS, earlier=earlier))
    return found


def by_telephone(stimuli: Iterable[Stimulus]) -> list[Stimulus]:
    """The same in a session by telephone, with the turn before."""
    return [
        replace(
            each,
            kind=f"{each.kind}_all_by_telephone",
            pcm=_telephone(each.pcm, each.name),
            earlier=None if each.earlier is None else _telephone(each.earlier, each.name),
        )
        for each in stimuli
    ]


def of_changed_users(clips: Sequence[Clip], split: str) -> list[Stimulus]:
    """Interruptions by a user who sounds otherwise than in the turn before."""
    long = long_clips([clip for clip in clips if split_of(clip.group) == split])
    return [
        Stimulus(
            clip.name,
            clip.group,
            f"{INTERRUPTION}_{how}",
            _heard(change(_voice(clip), clip.name), _tone(clip)),
            _ONSET_MS,
            earlier=_earlier(clip),
        )
        for how, change in CHANGES.items()
        for clip in long
    ]


def _across_the_room(voice: np.ndarray, name: str) -> np.ndarray:
    return sounds.louder(sounds.in_room(voice, _ACROSS_DIRECT_DB, name), _ACROSS_DB)


def _turned_away(voice: np.ndarray, name: str) -> np.ndarray:
    dull = np.convolve(voice, np.ones(_AWAY_TAPS) / _AWAY_TAPS, mode="same").astype(np.int16)
    return sounds.louder(sounds.in_room(dull, _ACROSS_DIRECT_DB, name), _AWAY_DB)


def _telephone(voice: np.ndarray, _name: str) -> np.ndarray:
    spectrum = np.fft.rfft(voice / 1.0)
    hz = np.fft.rfftfreq(len(voice), 1 / INPUT_RATE_HZ)
    spectrum[(hz < _TELEPHONE_HZ[0]) | (hz > _TELEPHONE_HZ[1])] = 0
    return np.fft.irfft(spectrum, len(voice)).clip(-32768, 32767).astype(np.int16)


def _hoarse(voice: np.ndarray, _name: str) -> np.ndarray:
    """Pitch and formants 5 % lower, as by a swollen throat."""
    at = np.arange(0, len(voice) - 1, 1 / _LOWER)
    return np.interp(at, np.arange(len(voice)), voice).astype(np.int16)


# How a user's voice may differ from the turn before.
CHANGES: dict[str, Callable[[np.ndarray, str], np.ndarray]] = {
    "softer": lambda voice, _name: sounds.louder(voice, _SOFTER_DB),
    "across_the_room": _across_the_room,
    "turned_away": _turned_away,
    "by_telephone": _telephone,
    "with_a_lower_voice": _hoarse,
}


def _side_talk(clip: Clip) -> np.ndarray:
    far = np.convolve(_voice(clip), np.ones(_SIDE_TAPS) / _SIDE_TAPS, mode="same")
    return sounds.at_level(far, sounds.NEAR_DB + _SIDE_DB)


def _television(clip: Clip) -> np.ndarray:
    heard = sounds.in_room(_voice(clip), _TELEVISION_DIRECT_DB, clip.name)
    return sounds.at_level(heard, sounds.NEAR_DB + _TELEVISION_DB)


def _noise(clip: Clip) -> Stimulus:
    pcm = sounds.at_level(clip.pcm[: sounds.samples(_LASTS_MS)], sounds.NEAR_DB)
    pcm = _heard(pcm, sounds.soft_noise(clip.name))
    return Stimulus(clip.name, clip.group, clip.name, pcm, _ONSET_MS)


def _synthetic(split: str) -> Iterable[Stimulus]:
    for kind, make in _SYNTHETIC.items():
        for number in range(_N_SYNTHETIC):
            name = f"{kind}/{split}/{number}"
            sound = make(sounds.rng_of(name), sounds.samples(_LASTS_MS))
            pcm = sounds.at_level(sounds.to_pcm(sound / np.abs(sound).max()), sounds.NEAR_DB)
            pcm = _heard(pcm, sounds.soft_noise(name))
            yield Stimulus(name, name, kind, pcm, _ONSET_MS)


def _echoes(clips: Sequence[Clip]) -> Iterable[Stimulus]:
    for clip in clips:
        playing = _spoken(clip, sounds.samples(_ONSET_MS + _LASTS_MS))
        tone = sounds.lasting(sounds.soft_noise(clip.name), len(playing))
        for db in ECHO_DB:
            for delay_ms in ECHO_DELAYS_MS:
                pcm = sounds.mixed(tone, sounds.echo(playing, db, delay_ms))
                kind = f"echo {db} dB {delay_ms} ms"
                yield Stimulus(clip.name, clip.group, kind, pcm, 0.0, playing)
            reflected = sounds.in_room(playing, ROOM_DB, clip.name)
            pcm = sounds.mixed(tone, sounds.echo(reflected, db, ROOM_DELAY_MS))
            kind = f"echo {db} dB {ROOM_DELAY_MS} ms in a room_synthetic"
            yield Stimulus(clip.name, clip.group, kind, pcm, 0.0, playing)
