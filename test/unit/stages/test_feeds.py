"""What a stage tells its engine beside requests, and what it is told back."""

import asyncio

import pytest

from sglang_live import messages
from sglang_live.clock import SimClock
from sglang_live.messages import (
    HeardOfMany,
    Interrupt,
    NextUseHint,
    PolicyReport,
    Promote,
    Retained,
    RetainSession,
    SessionKv,
    Truncated,
    TruncateSession,
    UserSpeaking,
)
from sglang_live.stages.engine_link import FLUSH_EVERY_S, HeardFeed, PolicyTotals
from sglang_live.stages.thinker import engine_control
from sglang_live.stages.thinker.engine_control import ThinkerFeed

pytestmark = pytest.mark.usefixtures("must_not_hang")


def heard(heard_s: float, advancing: bool = True) -> messages.Heard:
    return messages.Heard("job", heard_s, advancing)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def sent() -> list:
    return []


# --- progress ---


@pytest.fixture
def progress(sent, clock) -> HeardFeed:
    return HeardFeed(sent.append, clock)


async def test_progress_of_many_replies_is_one_message(progress, sent):
    progress.put("a", heard(1.0))
    progress.put("b", heard(2.0, False))
    await settle()
    assert sent == [HeardOfMany.of(["a", "b"], [1.0, 2.0], [True, False])]


async def test_of_one_request_the_last_progress_counts(progress, sent):
    progress.put("a", heard(1.0))
    progress.put("a", heard(1.5, False))
    await settle()
    assert sent == [HeardOfMany.of(["a"], [1.5], [False])]


async def test_progress_waits_for_the_end_of_the_interval(progress, sent, clock):
    progress.put("a", heard(1.0))
    await settle()
    for n in range(50):
        progress.put("a", heard(2.0 + n))
        await settle()
    assert len(sent) == 1
    clock.advance(FLUSH_EVERY_S)
    await settle()
    assert [message.columns()["heard_s"].tolist() for message in sent] == [[1.0], [51.0]]


async def test_without_progress_nothing_is_sent(progress, sent, clock):
    progress.put("a", heard(1.0))
    for _ in range(10):
        await settle()
        clock.advance(FLUSH_EVERY_S)
    assert len(sent) == 1
    progress.put("a", heard(2.0))
    await settle()
    assert len(sent) == 2, "news after a pause do not wait"


async def test_progress_of_an_ended_request_is_not_sent(progress, sent):
    progress.put("a", heard(1.0))
    progress.put("b", heard(1.0))
    progress.forget("a")
    progress.forget("never heard of")
    await settle()
    assert [message.rids for message in sent] == [["b"]]


# --- the thinker's engine ---


class FakeSocket:
    def __init__(self, sent: list):
        self.send = sent.append


@pytest.fixture
def feed(sent, clock) -> ThinkerFeed:
    return ThinkerFeed(FakeSocket(sent), clock)


def test_orders_and_speech_are_sent_at_once(feed, sent):
    feed.interrupt("r")
    feed.promote("p")
    feed.hint(UserSpeaking("s"))
    feed.hint(UserSpeaking("s", False))
    assert sent == [Interrupt("r"), Promote("p"), UserSpeaking("s"), UserSpeaking("s", False)]


def test_every_next_use_hint_is_sent_at_once(feed, sent):
    feed.hint(NextUseHint("s", 2.5))
    feed.hint(NextUseHint("s", 0.0, 1.5, 1.25))
    assert sent == [NextUseHint("s", 2.5, None, None), NextUseHint("s", 0.0, 1.5, 1.25)]


@pytest.mark.parametrize(("answer", "is_done"), [(7, True), (-1, False), (6, False)])
async def test_a_truncation_is_done_when_the_engine_says_exactly_that(feed, sent, answer, is_done):
    asking = asyncio.create_task(feed.truncate("s", 7))
    await settle()
    assert sent == [TruncateSession("s", 7, 1)]
    feed.answered(Truncated("s", 7, 2))
    await settle()
    assert not asking.done()
    feed.answered(Truncated("s", answer, 1))
    assert await asking == is_done


async def test_a_late_truncation_is_waited_for_and_counted(feed, monkeypatch):
    monkeypatch.setattr(engine_control, "LATE_S", 0.01)
    asking = asyncio.create_task(feed.truncate("s", 7))
    await asyncio.sleep(0.05)
    assert not asking.done()
    assert feed.awaits_answer and feed.n_late == 1
    feed.answered(Truncated("s", 7, 1))
    assert await asking
    assert not feed.awaits_answer


async def test_the_end_of_its_turn_ends_the_wait_for_a_truncation(feed):
    asking = asyncio.create_task(feed.truncate("s", 7))
    await settle()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not feed.awaits_answer
    feed.answered(Truncated("s", 7, 1))  # too late


async def test_truncations_of_many_sessions_do_not_mix(feed, sent):
    one, other = (asyncio.create_task(feed.truncate(s, 7)) for s in ("one", "other"))
    await settle()
    for order, n_tokens in zip(reversed(sent), (7, -1), strict=True):
        feed.answered(Truncated(order.session_id, n_tokens, order.ask_id))
    assert (await one, await other) == (False, True)


async def test_two_questions_about_one_session_have_an_answer_each(feed, sent):
    order = RetainSession("s", 4, 64, 8)
    one, other = (asyncio.create_task(feed.retain(order)) for _ in range(2))
    await settle()
    first, second = (order.ask_id for order in sent)
    feed.answered(Retained("s", 68, ask_id=first))
    assert (await one).n_tokens == 68
    assert feed.awaits_answer
    feed.answered(Retained("s", 70, ask_id=second))
    assert (await other).n_tokens == 70


@pytest.mark.parametrize(
    ("ask", "nothing"),
    [
        (lambda feed: feed.truncate("s", 7), False),
        (lambda feed: feed.kv_held("s"), None),
        (lambda feed: feed.retain(RetainSession("s", 4, 64, 8)), None),
        (lambda feed: feed.retain_native(RetainSession("s", 4, 64, 8)), False),
    ],
)
async def test_every_question_has_a_limit_and_a_late_answer_serves_no_other(
    feed, monkeypatch, ask, nothing
):
    monkeypatch.setattr(engine_control, "LATE_S", 0.0)
    monkeypatch.setattr(engine_control, "ANSWER_TIMEOUT_S", 0.01)
    assert await ask(feed) == nothing
    assert (feed.n_late, feed.n_missing, feed.awaits_answer) == (1, 1, False)
    monkeypatch.setattr(engine_control, "ANSWER_TIMEOUT_S", 5.0)
    asking = asyncio.create_task(feed.truncate("s", 3))
    await settle()
    for late in (Truncated("s", 7, 1), SessionKv("s", 7, 1), Retained("s", 7, ask_id=1)):
        feed.answered(late)
    await settle()
    assert not asking.done()
    feed.answered(Truncated("s", 3, 2))
    assert await asking


async def test_a_bound_is_answered_with_what_the_session_holds_now(feed, sent):
    asking = asyncio.create_task(feed.retain(RetainSession("s", 4, 64, 8)))
    await settle()
    assert sent == [RetainSession("s", 4, 64, 8, ask_id=1)]
    feed.answered(Retained("s", 68, 4, 30, 1))
    assert await asking == Retained("s", 68, 4, 30, 1)


async def test_a_bound_the_engine_cannot_keep_now_is_no_answer(feed):
    asking = asyncio.create_task(feed.retain(RetainSession("s", 4, 64, 8)))
    await settle()
    feed.answered(Retained("s", -1, ask_id=1))
    assert await asking is None


@pytest.mark.parametrize("n_tokens", [-1, 0, 68])
async def test_a_bound_without_a_session_of_ours_is_in_force_once_it_is_answered(
    feed, sent, n_tokens
):
    asking = asyncio.create_task(feed.retain_native(RetainSession("s", 4, 64, 8)))
    await settle()
    assert sent == [RetainSession("s", 4, 64, 8, every_request=True, ask_id=1)]
    assert not asking.done()
    feed.answered(Retained("s", n_tokens, ask_id=1))
    assert await asking


# --- what policies report ---


def test_totals_are_the_newest():
    totals = PolicyTotals()
    assert totals.load() == {}
    totals.take(PolicyReport({"pauses": 1.0}))
    totals.take(PolicyReport({"pauses": 3.0, "held_s": 0.5}))
    assert totals.load() == {"policy_pauses": 3.0, "policy_held_s": 0.5}
