"""How well embeddings tell speakers apart: equal error rates by length, on recordings of people.

A user is known by the end of their recordings; parts of the rest are compared with every user. At
the equal error rate as many parts of the user are refused as parts of others are accepted. Each
speaker was recorded once, so voice and microphone are the same: a bound from below.
"""

from collections.abc import Sequence

import numpy as np

from benchmark.turn_taking.clips import Clip
from benchmark.turn_taking.stimuli import CHANGES
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.filters.voiceprint import SpeakerModel

DURATIONS_S = (0.25, 0.5, 1.0, 2.0)
SAME = "as recorded"
_KNOWN_S = 3.0
_MOST_PARTS = 14
_RANGE_DB = 20.0
_FRAME = INPUT_RATE_HZ // 50


def error_rows(clips: Sequence[Clip], model: SpeakerModel) -> list[dict]:
    """One row for each length and change of the compared parts, over both splits."""
    voices = {name: voice_of(parts) for name, parts in by_speaker(clips).items()}
    n_known = round(_KNOWN_S * INPUT_RATE_HZ)
    voices = {name: voice for name, voice in voices.items() if len(voice) >= 2 * n_known}
    rows = []
    for duration_s in DURATIONS_S:
        n = round(duration_s * INPUT_RATE_HZ)
        users = {name: _direction(model, voice[-n_known:], n) for name, voice in voices.items()}
        for change in (SAME, *CHANGES):
            same: list[float] = []
            other: list[float] = []
            for name, voice in voices.items():
                rest = voice[:-n_known]
                if change != SAME:
                    rest = CHANGES[change](rest, name)
                [found] = model.embed(_parts(rest, n, max(n, INPUT_RATE_HZ // 2))[:_MOST_PARTS])
                for user, direction in users.items():
                    (same if user == name else other).extend((found @ direction).tolist())
            rows.append(
                {
                    "duration_s": duration_s,
                    "change": change,
                    "speakers": len(users),
                    "same": len(same),
                    "other": len(other),
                    "equal_error": equal_error(np.array(same), np.array(other)),
                }
            )
    return rows


def by_speaker(clips: Sequence[Clip]) -> dict[str, list[np.ndarray]]:
    """Recordings of speakers alone, and what of meetings has no second voice."""
    found: dict[str, list[np.ndarray]] = {}
    for clip in clips:
        if clip.kind == "speech":
            found.setdefault(clip.group, []).append(clip.pcm)
        for unit in clip.units:
            others = (u for u in clip.units if u.speaker != unit.speaker)
            if not any(u.start_ms < unit.end_ms and u.end_ms > unit.start_ms for u in others):
                first, last = (
                    round(ms * INPUT_RATE_HZ / 1000) for ms in (unit.start_ms, unit.end_ms)
                )
                found.setdefault(unit.speaker, []).append(clip.pcm[first:last])
    return found


def voice_of(recordings: Sequence[np.ndarray]) -> np.ndarray:
    """Without silence: the frames within _RANGE_DB of each recording's loudest."""
    loud = []
    for pcm in recordings:
        frames = pcm[: len(pcm) // _FRAME * _FRAME].reshape(-1, _FRAME)
        power = (frames.astype(float) ** 2).mean(axis=1)
        loud.append(frames[power >= power.max(initial=0) * 10 ** (-_RANGE_DB / 10)].reshape(-1))
    return np.concatenate(loud)


def equal_error(same: np.ndarray, other: np.ndarray) -> float:
    """The mean of both error rates at the bound where they are closest."""
    bounds = np.concatenate((same, other))
    refused = (same[None] < bounds[:, None]).mean(axis=1)
    accepted = (other[None] >= bounds[:, None]).mean(axis=1)
    at = int(np.argmin(np.abs(refused - accepted)))
    return float((refused[at] + accepted[at]) / 2)


def _parts(voice: np.ndarray, n: int, step: int) -> list[np.ndarray]:
    return [voice[at : at + n] for at in range(0, len(voice) - n + 1, step)]


def _direction(model: SpeakerModel, voice: np.ndarray, n: int) -> np.ndarray:
    mean = model.embed(_parts(voice, n, INPUT_RATE_HZ // 4))[0].mean(axis=0)
    return mean / np.linalg.norm(mean)
