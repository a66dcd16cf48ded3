"""How the users talk, and what that makes of a session: its turns, its tokens, its load."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from sglang_live.extensions.planner.simulation.server.thinker_session import (
    AUDIO_TOKENS_PER_S,
    END_MARKUP_TOKENS,
    TURN_MARKUP_TOKENS,
)
from sglang_live.extensions.planner.simulation.workload import History, Workload
from sglang_live.kv.retention import RetentionConfig
from sglang_live.policy.view import FRAME_S
from sglang_live.settings import Check, Count, Settings, Share, flag

# Turns of each user in a simulated run, and the seed of their draws.
_TURNS, _SEED = 6, 1


def _from(least: float) -> Check:
    return Check(f"a number from {least:g}", lambda v: least <= v < math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkPattern(Settings):
    talk_s: Annotated[float, _from(0.5)] = flag(5.0, "of a user's turn, on average")
    response_s: Annotated[float, _from(0.5)] = flag(7.0, "of a response, on average")
    interruptions: Share = flag(0.2, "of responses that the user interrupts", value="SHARE")
    session_min: Annotated[float, _from(0.1)] = flag(5.0, "of a session", value="MIN")
    # English takes 3.7.
    frames_per_token: Annotated[float, _from(1)] = flag(
        3.7, "codec frames for a token of text", value="X"
    )
    header_tokens: Count = flag(200, "instructions")

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
