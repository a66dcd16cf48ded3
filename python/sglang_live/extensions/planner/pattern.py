"""How the users talk, and what that makes of a session: its turns, its tokens, its load."""

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from sglang_live.errors import BadInputError
from sglang_live.extensions.planner.simulation.server.session import History
from sglang_live.extensions.planner.simulation.server.sessions import (
    AUDIO_TOKENS_PER_S,
    END_MARKUP_TOKENS,
    TURN_MARKUP_TOKENS,
)
from sglang_live.extensions.planner.simulation.workload import Workload
from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.view import FRAME_S

# Turns of each user in a simulated run, and the seed of their draws.
_TURNS, _SEED = 6, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkPattern:
    """
    talk_s: mean duration of a user's turn. response_s: of a whole response.
    interruptions: share of responses that the user interrupts.
    session_min: minutes of a session.
    frames_per_token: codec frames for a token of text; English takes 3.7.
    header_tokens: of the instructions.
    """

    talk_s: float = 5.0
    response_s: float = 7.0
    interruptions: float = 0.2
    session_min: float = 5.0
    frames_per_token: float = 3.7
    header_tokens: int = 200

    def __post_init__(self) -> None:
        for field in fields(self):
            value, flag = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if not math.isfinite(value) or value < 0:
                raise BadInputError(f"{flag} must be a number from 0, got {value}")
        if self.interruptions > 1:
            raise BadInputError(f"--interruptions is a share up to 1, got {self.interruptions:g}")
        for name, least in (("talk_s", 0.5), ("response_s", 0.5), ("session_min", 0.1)):
            if getattr(self, name) < least:
                raise BadInputError(f"--{name.replace('_', '-')} is at least {least}")
        if self.frames_per_token < 1 or self.header_tokens < 1:
            raise BadInputError("--frames-per-token and --header-tokens are at least 1")

    @property
    def workload(self) -> Workload:
        """Clips and responses of voice_load, made as long on average as here."""
        found = Workload.load(turns=_TURNS, barge_in=self.interruptions, seed=_SEED)
        mean_s = float(np.mean([clip.end_s - clip.onset_s for clip in found.clips.values()]))
        longer = self.talk_s / mean_s
        clips = {
            name: replace(
                clip,
                duration_s=longer * clip.duration_s,
                onset_s=longer * clip.onset_s,
                end_s=longer * clip.end_s,
            )
            for name, clip in found.clips.items()
        }
        response_s = float(found.response_durations_s.mean())
        return replace(found, clips=clips).with_longer_responses(self.response_s / response_s)

    @property
    def turn_s(self) -> float:
        """From one turn of a user to the next; without the server's time, some tenths of it."""
        workload = self.workload
        ends_s = np.mean([clip.end_s + clip.end_known_s for clip in workload.clips.values()])
        heard_s = self.response_s * (1 - self.interruptions / 2)
        # An interruption begins at once.
        gap_s = float(workload.response_gaps_s.mean()) * (1 - self.interruptions)
        return float(ends_s) + heard_s + gap_s

    @property
    def longest(self) -> History:
        """What a session holds at its end, without the instructions."""
        n_turns = 60 * self.session_min / self.turn_s
        n_user = self.talk_s * AUDIO_TOKENS_PER_S + TURN_MARKUP_TOKENS + END_MARKUP_TOKENS
        n_response = self.response_s / FRAME_S / self.frames_per_token
        retention = RetentionConfig()
        most = retention.window_tokens + retention.slack_tokens
        n_tokens = min(most, round(n_turns * (n_user + n_response)))
        return History(n_tokens, round(min(n_tokens, n_turns * n_user, retention.window_tokens)))

    @property
    def session_tokens(self) -> int:
        """KV of a session at its end, with its instructions."""
        return self.header_tokens + self.longest.n_tokens
