"""Turns, pauses and back-channels from an annotation of who speaks when. Pure.

A unit is a word, or a segment of an annotation without words.
"""

import string
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmark.turn_taking.timeline import Span

MIN_PAUSE_MS = 200.0
# A longer silence ends a turn, whether or not another speaker follows.
LONG_SILENCE_MS = 3000.0
# A listener's "mm-hmm" is not longer, and does not end the turn of the one who speaks.
MAX_BACKCHANNEL_MS = 1000.0
_SAID = "mm hmm mmhmm mhm mmm hm uhhuh yeah yep yes okay ok right sure ah oh uh huh"
BACKCHANNELS = frozenset(_SAID.split())
LAUGHTER = "[laughter]"


@dataclass(frozen=True, slots=True)
class Unit:
    """text: the word; None: the annotation has no words."""

    speaker: str
    start_ms: float
    end_ms: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """
    pauses: silences between the units.
    next_ms: where another speaker, or the same one after a long silence, begins; None: none does.
    alone: no other speaker is heard during the turn's last part.
    """

    start_ms: float
    end_ms: float
    pauses: tuple[Span, ...]
    next_ms: float | None
    alone: bool


def spurts(units: Iterable[Unit]) -> list[list[Unit]]:
    """Units of one speaker, joined where less than MIN_PAUSE_MS is between them."""
    joined: list[list[Unit]] = []
    for unit in sorted(units, key=lambda unit: unit.start_ms):
        if joined and unit.start_ms - joined[-1][-1].end_ms < MIN_PAUSE_MS:
            joined[-1].append(unit)
        else:
            joined.append([unit])
    return joined


def is_backchannel(spurt: Sequence[Unit]) -> bool:
    """Short, and of nothing but the words of a listener where there are words."""
    if spurt[-1].end_ms - spurt[0].start_ms > MAX_BACKCHANNEL_MS:
        return False
    return all(unit.text is None or _is_listeners(unit.text) for unit in spurt)


def _is_listeners(text: str) -> bool:
    word = "".join(c for c in text.lower() if c not in string.punctuation)
    return text == LAUGHTER or word in BACKCHANNELS


def turns_of(units: Sequence[Unit], speaker: str, *, alone_ms: float = 300.0) -> list[Cut]:
    """The speaker's turns, without those that are only back-channels.

    A turn ends where another speaker takes the turn, or with LONG_SILENCE_MS.
    alone_ms: the last part of a turn, for `alone`.
    """
    own = spurts(unit for unit in units if unit.speaker == speaker)
    others = _spurts_of_others(units, speaker)
    taken = [spurt[0].start_ms for spurt in others if not is_backchannel(spurt)]
    return [_cut(turn, own, others, alone_ms) for turn in spurts_of_turns(own, taken)]


def spurts_of_turns(own: Iterable[list[Unit]], taken_ms: Iterable[float]) -> list[list[list[Unit]]]:
    """The turns of a speaker's spurts, without those that are only back-channels.

    taken_ms: where other speakers take the turn.
    """
    turns: list[list[list[Unit]]] = []
    taken_ms = sorted(taken_ms)
    for spurt in own:
        if turns and _goes_on(turns[-1][-1], spurt, taken_ms):
            turns[-1].append(spurt)
        else:
            turns.append([spurt])
    return [turn for turn in turns if not (len(turn) == 1 and is_backchannel(turn[0]))]


def _spurts_of_others(units: Sequence[Unit], speaker: str) -> list[list[Unit]]:
    names = sorted({unit.speaker for unit in units} - {speaker})
    return [spurt for name in names for spurt in spurts(u for u in units if u.speaker == name)]


def _goes_on(before: list[Unit], after: list[Unit], taken_ms: Sequence[float]) -> bool:
    end_ms, start_ms = before[-1].end_ms, after[0].start_ms
    if start_ms - end_ms >= LONG_SILENCE_MS:
        return False
    at = bisect_left(taken_ms, end_ms - MIN_PAUSE_MS)
    return at == len(taken_ms) or taken_ms[at] >= start_ms


def _cut(
    turn: list[list[Unit]], own: list[list[Unit]], others: list[list[Unit]], alone_ms: float
) -> Cut:
    start_ms, end_ms = turn[0][0].start_ms, turn[-1][-1].end_ms
    pauses = tuple(Span(before[-1].end_ms, after[0].start_ms) for before, after in pairwise(turn))
    overlaps = any(s[0].start_ms < end_ms and s[-1].end_ms > end_ms - alone_ms for s in others)
    onsets = [spurt[0].start_ms for spurt in own + others]
    next_ms = min((at for at in onsets if at >= end_ms), default=None)
    return Cut(start_ms, end_ms, pauses, next_ms, not overlaps)


def backchannels_of(units: Sequence[Unit], *, alone: bool = False) -> list[tuple[str, Span]]:
    """Back-channels while another speaker has the turn: speaker and span.

    alone: only where no other speaker is heard at the same time, for a channel of all speakers.
    """
    found = []
    for speaker in sorted({unit.speaker for unit in units}):
        others = _spurts_of_others(units, speaker)
        for spurt in spurts(unit for unit in units if unit.speaker == speaker):
            span = Span(spurt[0].start_ms, spurt[-1].end_ms)
            if not is_backchannel(spurt) or (alone and _is_overlapped(span, others)):
                continue
            if alone or _is_overlapped(span, [s for s in others if not is_backchannel(s)]):
                found.append((speaker, span))
    return found


def beginnings_of(units: Sequence[Unit], least_ms: float) -> list[tuple[str, Span]]:
    """The first least_ms of spurts that last longer: speaker and span, where no other is heard."""
    found = []
    for speaker in sorted({unit.speaker for unit in units}):
        others = _spurts_of_others(units, speaker)
        for spurt in spurts(unit for unit in units if unit.speaker == speaker):
            start_ms = spurt[0].start_ms
            span = Span(start_ms, start_ms + least_ms)
            before = Span(start_ms - MIN_PAUSE_MS, span.end_ms)
            if spurt[-1].end_ms > span.end_ms and not _is_overlapped(before, others):
                found.append((speaker, span))
    return found


def _is_overlapped(span: Span, others: list[list[Unit]]) -> bool:
    return any(s[0].start_ms < span.end_ms and s[-1].end_ms > span.start_ms for s in others)
