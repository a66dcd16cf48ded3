"""Jobs between a StageClient and a StageServer: order, ends, errors, back-pressure."""

import asyncio
import contextlib

import numpy as np
import pytest

from sglang_live.errors import (
    BadInputError,
    CapacityError,
    LiveError,
    StageFailedError,
    StageUnavailableError,
)
from sglang_live.messages import (
    CloseSession,
    CodecFrames,
    Heard,
    NextUseHint,
    Pcm,
    Ready,
    TalkerDone,
    TalkerInput,
    TalkerRequest,
    TensorRef,
    UserSegment,
    UserSpeaking,
    VocoderDone,
    VocoderRequest,
    WireSegment,
)
from sglang_live.stages.transport import wire
from sglang_live.stages.transport.client import StageClient
from sglang_live.stages.transport.queues import WINDOW

pytestmark = pytest.mark.usefixtures("must_not_hang")

PATIENCE_S = 30.0
ROWS = np.arange(600, dtype=np.float32).reshape(20, 30)


def voice(job_id: str = "j", timeout_s: float = 60.0) -> VocoderRequest:
    return VocoderRequest(job_id, timeout_s)


def speak(job_id: str, states: TensorRef | None = None) -> TalkerRequest:
    return TalkerRequest(
        job_id,
        session_id="s",
        segment_keys=["k"],
        segments=[WireSegment("k", [1, 2], states)],
        voice="ethan",
        first_id=1,
        temperature=None,
        seed=0,
        timeout_s=60.0,
    )


async def wait_forever(job) -> None:
    await asyncio.Event().wait()


async def gone(directory) -> None:
    """Wait until `directory` is empty."""
    async with asyncio.timeout(PATIENCE_S):
        while list(directory.iterdir()):
            await asyncio.sleep(0.001)


async def heard(job, *until: type) -> list:
    return [message async for message, _ in job.events(*until)]


# --- order and content ---


async def test_events_come_in_order_and_end_with_the_last_one(serve):
    async def run(job):
        for n in range(40):
            await job.send(Pcm(job.job_id, bytes([n])))
        await job.send(VocoderDone(job.job_id))

    async with serve(run).peer().open("j") as job:
        await job.begin(voice())
        events = await heard(job, VocoderDone)
    assert [event.pcm for event in events[:-1]] == [bytes([n]) for n in range(40)]
    assert events[-1] == VocoderDone("j")


async def test_input_reaches_the_stage_in_order_after_the_opener(serve):
    async def run(job):
        ids = [job.opener.timeout_s]
        async for message in job.inputs():
            ids += message.ids
            if message.done:
                break
        await job.send(Pcm(job.job_id, repr(ids).encode()))

    async with serve(run).peer().open("j") as job:
        await job.begin(voice(timeout_s=9.0))
        for n in range(30):
            await job.send(TalkerInput("j", [n]))
        await job.send(TalkerInput("j", [], done=True))
        [event] = await heard(job, Pcm)
    assert event.pcm.decode() == repr([9.0, *range(30)])


async def test_tensors_cross_in_both_directions(serve):
    async def run(job):
        rows = wire.take(job.opener.segments[0].states, job.frames)
        tensors = job.tensors()
        await job.send(
            UserSegment(job.job_id, WireSegment("k", [1], tensors.put(rows + 1))), tensors
        )

    async with serve(run).peer().open("j") as job:
        tensors = job.tensors()
        await job.begin(speak("j", tensors.put(ROWS)), tensors)
        async for message, frames in job.events(UserSegment):
            np.testing.assert_array_equal(wire.take(message.segment.states, frames), ROWS + 1)


async def test_jobs_of_one_peer_do_not_mix(serve):
    async def run(job):
        for n in range(5):
            await job.send(Pcm(job.job_id, bytes([n])))
            await asyncio.sleep(0)
        await job.send(VocoderDone(job.job_id))

    client = serve(run).peer()

    async def one(job_id: str) -> list:
        async with client.open(job_id) as job:
            await job.begin(voice(job_id))
            return await heard(job, VocoderDone)

    everything = await asyncio.gather(*(one(f"j{n}") for n in range(8)))
    for n, events in enumerate(everything):
        assert {event.job_id for event in events} == {f"j{n}"}
        assert [event.pcm for event in events[:-1]] == [bytes([n]) for n in range(5)]


async def test_two_clients_may_use_the_same_job_id(serve):
    async def run(job):
        async for message in job.inputs():
            await job.send(Pcm(job.job_id, bytes(message.ids)))
            await job.send(VocoderDone(job.job_id))

    stage = serve(run)
    async with stage.peer().open("j") as one, stage.peer().open("j") as other:
        await one.begin(voice())
        await other.begin(voice())
        await other.send(TalkerInput("j", [2]))
        await one.send(TalkerInput("j", [1]))
        assert (await heard(one, VocoderDone))[0].pcm == b"\x01"
        assert (await heard(other, VocoderDone))[0].pcm == b"\x02"


# --- failures ---


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (BadInputError("no such voice"), "invalid_value"),
        (CapacityError("full"), "server_overloaded"),
        (StageFailedError("engine aborted"), "stage_failed"),
        (LiveError("odd"), "internal_error"),
        (ZeroDivisionError("by zero"), "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_an_error_of_the_stage_reaches_the_peer_with_its_code(serve, raised, reason):
    async def run(job):
        raise raised

    async with serve(run).peer().open("j") as job:
        await job.begin(voice())
        with pytest.raises(StageFailedError, match=rf"fake/0: .*{raised}") as caught:
            await heard(job)
    assert caught.value.reason == reason


async def test_a_job_past_its_deadline_fails_as_such(serve):
    async with serve(wait_forever).peer().open("j") as job:
        await job.begin(voice(timeout_s=0.005))
        with pytest.raises(StageFailedError) as caught:
            await heard(job)
    assert caught.value.reason == "deadline_exceeded"


async def test_a_timeout_inside_the_stage_is_not_taken_for_the_deadline(serve):
    async def run(job):
        raise TimeoutError("device did not answer")

    async with serve(run).peer().open("j") as job:
        await job.begin(voice())
        with pytest.raises(StageFailedError, match="device did not answer") as caught:
            await heard(job)
    assert caught.value.reason == "internal_error"


async def test_events_before_a_failure_are_delivered_first(serve):
    async def run(job):
        await job.send(Pcm(job.job_id, b"ab"))
        raise CapacityError("full")

    events = []
    async with serve(run).peer().open("j") as job:
        await job.begin(voice())
        with pytest.raises(StageFailedError):
            async for message, _ in job.events(VocoderDone):
                events.append(message)
    assert events == [Pcm("j", b"ab")]


async def test_what_is_no_message_does_not_stop_the_stage(serve):
    stage = serve(wait_forever)
    client = stage.peer()
    await client._socket.send_multipart([b"\xc1 no msgpack"])
    await client._socket.send_multipart([b""])
    assert isinstance(await client.ping(PATIENCE_S), Ready)
    assert not stage.task.done()


async def test_messages_of_unknown_jobs_are_ignored_on_both_sides(serve):
    async def run(job):
        await job.send(Pcm("another peer's", b"ab"))
        await job.send(VocoderDone(job.job_id))

    stage = serve(run)
    client = stage.peer()
    await client.send(TalkerInput("never opened", [1]))
    client.send_later(UserSpeaking("s"))
    client.send_later(NextUseHint("s", 2.5, None, 0.25))
    client.send_later(CloseSession("s"))
    async with client.open("j") as job:
        await job.begin(voice())
        assert await heard(job, VocoderDone) == [VocoderDone("j")]
    await stage.until(lambda: stage.closed_sessions == ["s"])
    assert stage.hints == [UserSpeaking("s"), NextUseHint("s", 2.5, None, 0.25)]


# --- leaving ---


async def test_leaving_a_job_cancels_it_in_the_stage(serve):
    stage = serve(wait_forever)
    client = stage.peer()
    async with client.open("j") as job:
        await job.begin(voice())
        await client.ping(PATIENCE_S)
        assert stage.server.n_jobs == 1
    await stage.until(lambda: stage.cancelled == ["j"])
    await client.ping(PATIENCE_S)
    assert stage.server.n_jobs == 0


async def test_a_cancelled_job_ends_at_once_for_both_and_takes_nothing_more(serve):
    async def run(job):
        await job.send(Pcm("j", b"ab"))
        await wait_forever(job)

    stage = serve(run)
    client = stage.peer()
    async with client.open("j") as job:
        await job.begin(voice())
        events = job.events(VocoderDone)
        await anext(events)
        job.cancel()
        assert [event async for event in events] == []
        await stage.until(lambda: stage.cancelled == ["j"])
        for n in range(2 * WINDOW):
            await job.send(TalkerInput("j", [n]))
        job.post(Heard("j", 1.0, True))
        await job.begin(voice())
        job.cancel()
        await client.ping(PATIENCE_S)
        assert stage.server.n_jobs == 0
    assert stage.cancelled == ["j"]


async def test_cancelling_wakes_waits_for_events_and_for_the_window(serve):
    stage = serve(wait_forever)
    client = stage.peer()

    async def fill(job) -> None:
        for n in range(2 * WINDOW):
            await job.send(TalkerInput("j", [n]))

    async with client.open("j") as job:
        await job.begin(voice())
        hearing, filling = asyncio.create_task(heard(job)), asyncio.create_task(fill(job))
        await client.ping(PATIENCE_S)
        assert not hearing.done() and not filling.done()
        job.cancel()
        assert await hearing == []
        await filling


async def test_a_job_cancelled_before_it_began_is_never_seen(serve):
    stage = serve(wait_forever)
    client = stage.peer()
    async with client.open("j") as job:
        job.cancel()
        await job.begin(voice())
        assert await heard(job, VocoderDone) == []
        await client.ping(PATIENCE_S)
        assert stage.server.n_jobs == 0


async def test_states_that_a_cancelled_job_does_not_read_are_freed(serve, shared_memory):
    async def run(job):
        tensors = job.tensors()
        await job.send(UserSegment("j", WireSegment("k", [1], tensors.put(ROWS))), tensors)
        await wait_forever(job)

    client = serve(run).peer()
    async with client.open("j") as job:
        await job.begin(voice())
        await client.ping(PATIENCE_S)
        await client.ping(PATIENCE_S)
        assert list(shared_memory.iterdir())
        job.cancel()
        assert await heard(job, VocoderDone) == []
    await gone(shared_memory)


async def test_what_is_posted_needs_a_job_that_runs(serve):
    told = []

    async def run(job):
        async for message in job.inputs():
            told.append(message)
            await job.send(VocoderDone("j"))

    client = serve(run).peer()
    async with client.open("j") as job:
        job.post(Heard("j", 0.0, False))
        await job.begin(voice())
        job.post(Heard("j", 1.0, True))
        await heard(job, VocoderDone)
        job.post(Heard("j", 2.0, True))
        await client.ping(PATIENCE_S)
    assert told == [Heard("j", 1.0, True)]


async def test_a_job_left_before_the_stage_began_it_leaves_nothing_there(serve):
    stage = serve(wait_forever)
    client = stage.peer()
    async with client.open("j") as job:
        await job.begin(voice())
    await client.ping(PATIENCE_S)
    await client.ping(PATIENCE_S)
    assert stage.server.n_jobs == 0


async def test_an_error_in_the_clients_block_cancels_the_job_too(serve):
    stage = serve(wait_forever)
    client = stage.peer()
    with pytest.raises(KeyError):
        async with client.open("j") as job:
            await job.begin(voice())
            await client.ping(PATIENCE_S)
            raise KeyError
    await stage.until(lambda: stage.cancelled == ["j"])


async def test_a_finished_job_is_not_cancelled_and_an_unopened_one_never_seen(serve):
    async def run(job):
        await job.send(VocoderDone(job.job_id))
        await wait_forever(job)  # a Cancel would end this

    stage = serve(run)
    client = stage.peer()
    async with client.open("unopened"):
        pass
    async with client.open("finished") as job:
        await job.begin(voice("finished"))
        await heard(job, VocoderDone)
    await client.ping(PATIENCE_S)
    assert stage.cancelled == []
    assert stage.server.n_jobs == 1
    assert client.n_jobs == 0


async def test_a_job_that_is_begun_again_after_it_failed_is_a_job_like_any_other(serve):
    n_runs = 0

    async def run(job):
        nonlocal n_runs
        n_runs += 1
        if n_runs == 1:
            raise BadInputError("send the items again")
        await wait_forever(job)

    stage = serve(run)
    client = stage.peer()
    async with client.open("j") as job:
        await job.begin(voice())
        with pytest.raises(StageFailedError):
            await heard(job)
        await job.begin(voice())
        await client.ping(PATIENCE_S)
    await stage.until(lambda: stage.cancelled == ["j"])
    assert n_runs == 2


async def test_a_job_opened_under_an_open_jobs_id_fails_the_earlier_one_at_once(serve):
    """It would otherwise wait for messages that the later one receives."""

    async def run(job):
        async for message in job.inputs():
            await job.send(Pcm(job.job_id, bytes(message.ids)))

    stage = serve(run)
    client = stage.peer()
    async with contextlib.AsyncExitStack() as left_first:
        earlier = await left_first.enter_async_context(client.open("j"))
        await earlier.begin(voice())
        async with client.open("j") as later:
            await later.begin(voice())
            with pytest.raises(StageFailedError, match="opened again"):
                await heard(earlier)
            await left_first.aclose()  # which does not cancel the later one
            await later.send(TalkerInput("j", [7]))
            [event] = await heard(later, Pcm)
    assert event.pcm == bytes([7])


async def test_a_peer_that_disconnects_loses_its_own_jobs_only(serve):
    went = asyncio.Event()

    async def run(job):
        if job.job_id == "leaver":
            await went.wait()
            while True:  # the socket notices the loss a moment later
                await job.send(VocoderDone(job.job_id))
                await asyncio.sleep(0.001)
        await job.send(VocoderDone(job.job_id))

    stage = serve(run)
    leaver, stayer = stage.peer(), stage.peer()
    async with leaver.open("leaver") as job:
        await job.begin(voice("leaver"))
        await leaver.ping(PATIENCE_S)
        await leaver.close()
    went.set()
    await stage.until(lambda: stage.cancelled == ["leaver"])
    async with stayer.open("j") as job:
        await job.begin(voice())
        assert await heard(job, VocoderDone) == [VocoderDone("j")]
    assert not stage.task.done()


# --- tensors that are not read ---


async def test_leaving_a_job_frees_tensors_the_stage_did_not_take(serve, shared_memory):
    client = serve(wait_forever).peer()
    async with client.open("j") as job:
        tensors = job.tensors()
        await job.begin(speak("j", tensors.put(ROWS)), tensors)
        await client.ping(PATIENCE_S)
        assert len(list(shared_memory.iterdir())) == 1
    assert list(shared_memory.iterdir()) == []


async def test_leaving_a_job_frees_tensors_the_peer_did_not_take(serve, shared_memory):
    async def run(job):
        for _ in range(3):
            tensors = job.tensors()
            await job.send(
                UserSegment(job.job_id, WireSegment("k", [1], tensors.put(ROWS))), tensors
            )
        await job.send(VocoderDone(job.job_id))

    client = serve(run).peer()
    async with client.open("j") as job:
        await job.begin(voice())
        async for _ in job.events(UserSegment):
            break  # leaves one taken from the queue, two on their way or in it
    await client.ping(PATIENCE_S)
    # The one that was read belongs to its reader.
    assert len(list(shared_memory.iterdir())) == 1


async def test_a_tensor_that_comes_after_its_job_was_left_is_freed(serve, shared_memory):
    left = asyncio.Event()

    async def run(job):
        try:
            await wait_forever(job)
        finally:
            tensors = job.tensors()
            await job.send(
                UserSegment(job.job_id, WireSegment("k", [1], tensors.put(ROWS))), tensors
            )
            left.set()

    client = serve(run).peer()
    async with client.open("j") as job:
        await job.begin(voice())
        await client.ping(PATIENCE_S)
    await left.wait()
    await gone(shared_memory)


# --- back-pressure ---


async def test_a_peer_blocks_while_the_stage_is_a_window_behind(serve):
    may_read, n_read = asyncio.Event(), 0

    async def run(job):
        nonlocal n_read
        await may_read.wait()
        async for _ in job.inputs():
            n_read += 1

    client = serve(run).peer()
    n_sent = 0

    async def send_all() -> None:
        nonlocal n_sent
        for n in range(3 * WINDOW):
            await job.send(TalkerInput("j", [n]))
            n_sent += 1

    async with client.open("j") as job:
        await job.begin(voice())
        sending = asyncio.create_task(send_all())
        await client.ping(PATIENCE_S)
        assert n_sent == WINDOW
        may_read.set()
        await sending
    assert n_read >= 2 * WINDOW


async def test_a_stage_blocks_while_its_peer_is_a_window_behind(serve):
    n_sent = 0

    async def run(job):
        nonlocal n_sent
        for n in range(3 * WINDOW):
            await job.send(CodecFrames(job.job_id, bytes([n])))
            n_sent += 1
        await job.send(TalkerDone(job.job_id, "stop", n_sent))

    client = serve(run).peer()
    async with client.open("j") as job:
        await job.begin(voice())
        await client.ping(PATIENCE_S)
        await client.ping(PATIENCE_S)
        assert n_sent == WINDOW
        events = await heard(job, TalkerDone)
    assert [event.codes for event in events[:-1]] == [bytes([n]) for n in range(3 * WINDOW)]


async def test_a_full_window_of_one_job_does_not_hold_up_another(serve):
    client = serve(wait_forever).peer()
    async with client.open("full") as full, client.open("free") as free:
        await full.begin(voice("full"))
        await free.begin(voice("free"))
        for _ in range(WINDOW):
            await full.send(TalkerInput("full", [1]))
        blocked = asyncio.create_task(full.send(TalkerInput("full", [1])))
        for _ in range(WINDOW):
            await free.send(TalkerInput("free", [1]))
        assert not blocked.done()
        blocked.cancel()


async def test_a_job_that_ended_early_blocks_no_sender(serve):
    async def run(job):
        await job.send(TalkerDone(job.job_id, "length", 0))

    async with serve(run).peer().open("j") as job:
        await job.begin(voice())
        sending = asyncio.gather(*(job.send(TalkerInput("j", [n])) for n in range(3 * WINDOW)))
        await heard(job, TalkerDone)
        await sending


# --- a stage that goes away ---


async def test_a_stage_going_away_ends_its_jobs_wakes_senders_and_refuses_new_jobs(serve):
    client = serve(wait_forever).peer()
    async with client.open("reading") as reading, client.open("writing") as writing:
        await reading.begin(voice("reading"))
        await writing.begin(voice("writing"))
        hearing = asyncio.create_task(heard(reading))
        for _ in range(WINDOW):
            await writing.send(TalkerInput("writing", [1]))
        blocked = asyncio.create_task(writing.send(TalkerInput("writing", [1])))
        await client.ping(PATIENCE_S)
        assert not blocked.done()
        client.fail_all("process ended")
        for task in (hearing, blocked):
            with pytest.raises(StageUnavailableError, match="fake/0: process ended"):
                await task
    with pytest.raises(StageUnavailableError):
        client.open("new")
    assert client.n_jobs == 0


async def test_closing_a_client_ends_its_jobs(serve):
    client = serve(wait_forever).peer()
    async with client.open("j") as job:
        await job.begin(voice())
        await client.close()
        with pytest.raises(StageUnavailableError, match="closed"):
            await heard(job)


# --- a peer that goes away ---


async def test_a_silent_peer_on_another_host_loses_its_jobs_and_sessions(serve):
    stage = serve(wait_forever, same_host=False, tick_s=0.02)
    async with stage.peer().open("j") as job:
        await job.begin(speak("j"))
        await stage.until(lambda: stage.cancelled == ["j"] and stage.closed_sessions == ["s"])


# --- ping ---


async def test_a_ping_is_answered_with_what_the_stage_says_of_itself(serve):
    client = serve(wait_forever).peer()
    ready = await client.ping(PATIENCE_S)
    assert ready == Ready("", stage="fake", pid=1, startup_s=0.5, load={"jobs": 2.0})


async def test_an_unanswered_ping_is_none_and_the_next_one_works(serve, address):
    client = StageClient("fake/0", address, same_host=True)
    assert await client.ping(0.005) is None
    serve(wait_forever)
    assert (await client.ping(PATIENCE_S)).stage == "fake"
    await client.close()
