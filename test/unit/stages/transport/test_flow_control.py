"""Back-pressure between a sender and a receiver of one job."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.stages.transport.queues import CREDIT_EVERY, WINDOW, ReceiveCount, SendWindow


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Sender:
    """Takes from the window as often as it can, up to `n` times."""

    def __init__(self, window: SendWindow, n: int):
        self.n_sent = 0
        self.task = asyncio.create_task(self._send(window, n))

    async def _send(self, window: SendWindow, n: int) -> None:
        for _ in range(n):
            await window.take()
            self.n_sent += 1


async def test_a_sender_stops_at_the_window_and_goes_on_with_credit():
    window = SendWindow()
    sender = Sender(window, WINDOW + 10)
    await settled()
    assert sender.n_sent == WINDOW
    window.add(3)
    await settled()
    assert sender.n_sent == WINDOW + 3
    window.add(7)
    await sender.task


async def test_lifting_the_window_lets_every_sender_go_on_for_good():
    window = SendWindow(1)
    senders = [Sender(window, 500) for _ in range(3)]
    await settled()
    window.lift()
    await asyncio.gather(*(sender.task for sender in senders))


@settings(max_examples=40)
@given(size=st.integers(1, 5), gifts=st.lists(st.integers(1, 4), max_size=10))
def test_several_senders_together_never_exceed_what_was_given(size, gifts):
    async def scenario() -> None:
        window = SendWindow(size)
        senders = [Sender(window, 100) for _ in range(3)]
        allowed = size
        for gift in [0, *gifts]:
            if gift:
                window.add(gift)
            allowed += gift
            await settled()
            assert sum(sender.n_sent for sender in senders) == allowed
        for sender in senders:
            sender.task.cancel()

    asyncio.run(scenario())


@given(st.integers(0, 200))
def test_credit_is_given_in_batches_and_never_for_more_than_was_taken(n_taken):
    count = ReceiveCount()
    credit = sum(count.took_one() for _ in range(n_taken))
    assert credit == n_taken - n_taken % CREDIT_EVERY


def test_a_full_window_always_earns_credit():
    assert CREDIT_EVERY <= WINDOW
