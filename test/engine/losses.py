"""Turns whose jobs are lost and go on, as in another replica: the stage has forgotten them."""

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sglang_live.clock import MonotonicClock
from sglang_live.core import AudioDelta, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.errors import StageUnavailableError
from sglang_live.messages import Cancel
from sglang_live.orchestrator.moves import Link
from sglang_live.orchestrator.stage_links import StageLinks
from sglang_live.orchestrator.turn import run_turn
from sglang_live.orchestrator.turn_control import TurnControl
from sglang_live.policy.policies import OFF
from sglang_live.stages.spec import StageSpec
from sglang_live.stages.transport.client import StageClient
from sglang_live.telemetry.trace import TurnTrace
from test.engine.conftest import SpeechLinks, Stages


@dataclass
class Told:
    """What a turn has told. pcm: int16. marks: tokens and where they end in the sound. moved:
    whether a job was lost before it had ended."""

    text: str
    ids: tuple[int, ...]
    pcm: np.ndarray
    marks: list[tuple[int, float]]
    done: TurnDone
    moved: bool

    def check_equal(self, other: "Told") -> None:
        assert (self.text, self.ids) == (other.text, other.ids)
        assert self.marks == other.marks
        assert self.done.n_frames == other.done.n_frames
        assert self.done.usage.output_text_tokens == other.done.usage.output_text_tokens
        assert len(self.pcm) == len(other.pcm)
        # Chunks of other sizes round otherwise.
        assert np.abs(self.pcm.astype(int) - other.pcm).max() <= 2


class ToItself:
    """A move to the replica that was lost. n: moves that were made."""

    def __init__(self) -> None:
        self.n = 0

    def make(
        self, link: Link, left: StageSpec, stays: str, lost: StageUnavailableError
    ) -> StageClient:
        assert not stays
        self.n += 1
        link.known.clear()
        return link.client()


async def lose_jobs(client: StageClient) -> None:
    for job_id in client.unfinished():
        client.send_later(Cancel(job_id))
    while (ready := await client.ping(10.0)) is None or ready.load["jobs"]:
        """The stage has not ended them."""
    client._fail_jobs(StageUnavailableError("lost"))


async def told(
    links: StageLinks, turn: TurnRequest, lost: str = "", behind: tuple[type, int] | None = None
) -> Told:
    """Run a turn.

    lost: a stage whose job is lost. behind: the number of events of a type that come before.
    """
    clock, move = MonotonicClock(), ToItself()
    trace, control = TurnTrace(clock), TurnControl(OFF, clock)
    events: list = []
    async for event in run_turn(turn, links, trace, control, move):
        events.append(event)
        if behind is not None and sum(isinstance(e, behind[0]) for e in events) >= behind[1]:
            behind = None
            await lose_jobs(getattr(links, lost).client())
    assert behind is None and move.n <= bool(lost)
    done = events[-1]
    assert isinstance(done, TurnDone)
    pcm = b"".join(event.pcm for event in events if isinstance(event, AudioDelta))
    text = "".join(event.text for event in events if isinstance(event, TranscriptDelta))
    marks = [mark for event in events if isinstance(event, AudioDelta) for mark in event.spoken]
    ids = tuple(done.item.token_ids or ())
    return Told(text, ids, np.frombuffer(pcm, "<i2"), marks, done, move.n == 1)


async def lost_turns_are_as_others(
    stages: Stages, turn: TurnRequest, deaths: Iterable[tuple[str, type, int]]
) -> None:
    """deaths: the stage that loses its job, and behind how many events of which type."""

    async def run(number: int, *death: Any) -> Told:
        links = stages.links(f"{turn.turn_id}-{number}")
        assert isinstance(links, StageLinks)
        own = replace(turn, turn_id=f"{turn.turn_id}-{number:06}")
        try:
            return await told(links, own, *death)
        finally:
            links.close()

    wanted = await run(0)
    assert len(wanted.pcm) > 24_000, "the case must not be trivial"
    moved: dict[str, bool] = {}
    for number, (stage, kind, n_events) in enumerate(deaths, 1):
        found = await run(number, stage, (kind, n_events))
        found.check_equal(wanted)
        moved[stage] = moved.get(stage, False) or found.moved
    # On a busy machine a late loss may find a job that has ended.
    assert all(moved.values()), moved


async def codes_with_loss(
    links: StageLinks | SpeechLinks,
    turn: TurnRequest,
    ids: list[int],
    lost_after: int,
    most_frames: int | None = None,
) -> np.ndarray:
    """Codes [n_frames, 16] of a text whose job is lost after lost_after frames; 0: never."""
    frames: list[np.ndarray] = []
    move = ToItself()
    async with links.talker.open(turn, move) as speech:
        await speech.write(ids, "a")
        await speech.end_text()
        async with aclosing(speech.frames()) as chunks:
            async for some in chunks:
                frames.extend(np.frombuffer(some, "<i2").reshape(-1, 16))
                if most_frames is not None and len(frames) >= most_frames:
                    break
                if 0 < lost_after <= len(frames):
                    lost_after = 0
                    await lose_jobs(links.talker.client())
                    assert not move.n, "it is made when the loss is read"
    return np.stack(frames[:most_frames])
