"""What people's voices do to a response, on the recordings that no setting was chosen on."""

from pathlib import Path

import numpy as np
import pytest

from benchmark.turn_taking.clips import read_clips
from benchmark.turn_taking.components import Hearing, RememberedScores, hear_interruptions
from benchmark.turn_taking.stimuli import BACKCHANNEL, INTERRUPTION, SIDE_TALK, voices
from sglang_live.interaction.silero import SileroModel
from sglang_live.interaction.vad import VadSettings

RECORDINGS = Path(__file__).parents[3] / "benchmark" / "workloads" / "turns"


@pytest.fixture(scope="module")
def reactions_ms() -> dict[tuple[str, bool], list[float | None]]:
    """By kind and whether back-channels and side talk are ignored: of each voice, the time from its
    onset to the stop; None: the agent goes on."""
    speech, confirm_ms = SileroModel(), VadSettings().confirm_ms
    found: dict[tuple[str, bool], list[float | None]] = {}
    for stimulus in voices(read_clips([RECORDINGS]), "held_out"):
        hearing = Hearing(stimulus.pcm, RememberedScores(speech), earlier=stimulus.earlier)
        for ignores in (False, True):
            decisions = hear_interruptions(hearing, confirm_ms, ignores)
            stops = [each.at_ms for each in decisions if each.kind == "stopped"]
            reaction_ms = stops[0] - stimulus.onset_ms if stops else None
            found.setdefault((stimulus.kind, ignores), []).append(reaction_ms)
    return found


def test_every_interruption_stops_the_agent_nearly_as_soon_as_before(reactions_ms):
    before, now = reactions_ms[INTERRUPTION, False], reactions_ms[INTERRUPTION, True]
    assert None not in now
    assert np.percentile(now, 50) <= np.percentile(before, 50)
    assert np.percentile(now, 95) <= np.percentile(before, 95) + 100


@pytest.mark.parametrize(("kind", "n_before"), [(BACKCHANNEL, 4), (SIDE_TALK, 11)])
def test_no_backchannel_and_no_side_talk_does(reactions_ms, kind, n_before):
    before, now = reactions_ms[kind, False], reactions_ms[kind, True]
    assert sum(each is not None for each in before) == n_before
    assert set(now) == {None}
