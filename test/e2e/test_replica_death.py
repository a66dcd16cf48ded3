"""kill -9 of one of two replicas: the turn that runs in it goes on in the other one, and so do its
sessions with their next turns.

A server of its own. The other replica serves while the dead one is being started again.
"""

import asyncio
import base64
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import numpy as np
import psutil
import pytest

from test.e2e.conftest import Server, running_server, wait_until
from test.e2e.socket_client import connected, is_whole

pytestmark = [pytest.mark.e2e]

LEFT = "sglang_live_stage_sessions_left_total"
START_S = 300
STAGES = ("thinker", "talker", "vocoder")
RATE_HZ = 24_000
SECONDS = 8
QUESTION = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "tell me a long story"}],
}
AUDIO, TEXT = "response.output_audio.delta", "response.output_audio_transcript.delta"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = [flag for stage in STAGES for flag in (f"--{stage}.replicas", "2")]
    path = tmp_path_factory.mktemp("replicas")
    with running_server("demo-random", path, *flags, start_timeout_s=START_S) as running:
        yield running


def process_of(server: Server, replica: str) -> psutil.Process:
    name = f"sglang_live::{replica}"
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if " ".join(child.cmdline()).startswith(name):
                found.append(child)
    [one] = found
    return one


def metrics(server: Server) -> str:
    return httpx.get(f"{server.http}/metrics", timeout=30).text


def until_both_are_up(server: Server, stage: str) -> None:
    def are_up() -> bool:
        lines = [f'sglang_live_stage_up{{replica="{n}",stage="{stage}"}} 1.0' for n in (0, 1)]
        return all(line in metrics(server) for line in lines)

    wait_until(are_up, START_S, f"both replicas of the {stage} are up")


# Both leave by the same steps; only the thinker's replica has memory of a session.
@pytest.mark.parametrize("stage", [pytest.param("vocoder", marks=pytest.mark.nightly), "thinker"])
async def test_sessions_of_a_killed_replica_answer_their_next_turn_on_the_other(server, stage):
    await asyncio.to_thread(until_both_are_up, server, stage)
    async with connected(server.ws) as one, connected(server.ws) as other:
        for session in (one, other):
            first = await session.ask("remember this")
            assert is_whole(first), first
        # The first of two equal replicas got the first session.
        killed = process_of(server, f"{stage}/0")
        killed.kill()

        def is_noticed() -> bool:
            """It is down, or up again, which may be half a second later."""
            if f'sglang_live_stage_up{{replica="0",stage="{stage}"}} 0.0' in metrics(server):
                return True
            with contextlib.suppress(ValueError):
                return process_of(server, f"{stage}/0").pid != killed.pid
            return False

        await asyncio.to_thread(wait_until, is_noticed, 20, "the death is noticed")
        for session in (one, other):
            again = await session.ask("and now")
            assert is_whole(again), again
            n_tokens = [done["response"]["usage"]["input_tokens"] for done in (first, again)]
            assert n_tokens[1] > n_tokens[0], "the whole conversation was heard"
        series = metrics(server)
        assert f'{LEFT}{{replica="0",stage="{stage}"}} 1.0' in series
        assert f'{LEFT}{{replica="1",stage="{stage}"}} 0.0' in series
    async with connected(server.ws) as new:
        assert is_whole(await new.ask("hello"))


@dataclass
class Heard:
    """The beginning of a response. pcm: int16 at 24 kHz, SECONDS of it.

    waited_s: the longest time without new audio, until a second of it has come after the kill:
        later, the talker is far ahead of its listener, and waits.
    silent_s: for how long at once a listener has heard nothing, who hears the audio as it comes.
    """

    pcm: np.ndarray
    text: str
    waited_s: float
    silent_s: float


async def heard(server: Server, kill: Callable[[], object], first: str, n: int) -> Heard:
    """Ask for a greedy response, and hear its beginning.

    kill: called after n events of the type `first`.
    """
    pcm, text, n_events = b"", "", 0
    waited_s = silent_s = 0.0
    killed_s = latest_s = runs_out_s = n_before = None
    async with connected(server.ws) as session:
        await session.send("conversation.item.create", item=QUESTION)
        await session.send("response.create", response={"temperature": 0, "max_output_tokens": 60})
        while len(pcm) < 2 * RATE_HZ * SECONDS:
            event = await session.until(AUDIO, TEXT, "response.done")
            assert event["type"] != "response.done", event
            n_events += event["type"] == first
            if killed_s is None and n_events >= n:
                kill()
                killed_s = latest_s = time.monotonic()
                n_before = len(pcm)
            if event["type"] == TEXT:
                text += event["delta"]
                continue
            now_s, new = time.monotonic(), base64.b64decode(event["delta"])
            if killed_s is not None and len(pcm) < n_before + 2 * RATE_HZ:
                waited_s, latest_s = max(waited_s, now_s - latest_s), now_s
            pcm += new
            if runs_out_s is not None:
                silent_s = max(silent_s, now_s - runs_out_s)
            runs_out_s = max(runs_out_s or now_s, now_s) + len(new) / 2 / RATE_HZ
        assert killed_s is not None
    samples = np.frombuffer(pcm, "<i2")[: RATE_HZ * SECONDS]
    return Heard(samples, text, waited_s, silent_s)


@pytest.mark.parametrize(
    ("stage", "first", "n"), [("vocoder", AUDIO, 1), ("talker", AUDIO, 1), ("thinker", TEXT, 3)]
)
async def test_a_turn_goes_on_when_its_replica_is_killed(server, stage, first, n):
    await asyncio.to_thread(until_both_are_up, server, stage)
    undisturbed = await heard(server, lambda: None, first, n)
    before = metrics(server)
    # The first of two equal replicas gets the session.
    found = await heard(server, process_of(server, f"{stage}/0").kill, first, n)
    moved = f'sglang_live_lost_jobs_total{{outcome="moved",stage="{stage}"}} 1.0'
    assert moved in metrics(server) and moved not in before
    n_same = min(len(found.text), len(undisturbed.text))
    assert n_same and found.text[:n_same] == undisturbed.text[:n_same]
    apart = np.abs(found.pcm.astype(int) - undisturbed.pcm)
    waits = [f"{one.waited_s:.2f}, {one.silent_s:.2f}" for one in (found, undisturbed)]
    print(
        f"\n{stage}: seconds without new audio, and silent to a listener: {waits[0]} when killed, "
        f"{waits[1]} undisturbed; {np.count_nonzero(apart)} of {len(apart)} samples differ by 1"
    )
    assert apart.max() <= 1  # chunks of other sizes round otherwise
    async with connected(server.ws) as new:
        assert is_whole(await new.ask("hello"))
