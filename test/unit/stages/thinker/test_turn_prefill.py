"""Utterances that are prefilled while the user speaks: no piece is prefilled twice, and pieces that
are withdrawn do not stay. The session must hold what one built from the history alone would hold.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import INPUT_RATE_HZ, AudioPart, HistoryItem
from sglang_live.errors import ContextLengthError
from sglang_live.kv.retention import RetentionConfig
from test.unit.stages.fake_engine import N_PLACES

from .test_session import LIMIT, Call, built_anew, call, kept, reply, user

__all__ = ["call"]

pytestmark = pytest.mark.usefixtures("must_not_hang")

HELLO = user("u0", "hello")


def seconds(duration_s: int) -> tuple[AudioPart]:
    return (AudioPart(np.zeros(duration_s * INPUT_RATE_HZ, np.int16)),)


def pieces(key: str, n: int, *, whole: bool) -> list[HistoryItem]:
    """The first n pieces of a message; the last of them ends it if it is whole."""
    pcm = (AudioPart(np.zeros(800, np.int16)),)
    return [
        HistoryItem(
            key=f"{key}/end" if whole and i == n - 1 else f"{key}/{i}",
            role="user",
            parts=pcm,
            opens=i == 0,
            closes=whole and i == n - 1,
        )
        for i in range(n)
    ]


async def answered(call: Call, *history: HistoryItem) -> list[HistoryItem]:
    """The history with the reply to it."""
    await call.turn(*history, key="r1")
    return [*history, reply("r1", *call.reply[:-1])]


async def test_at_the_end_only_the_last_piece_is_prefilled(call):
    history = await answered(call, HELLO)
    for n in (1, 2, 3):
        assert kept(await call.prefill_turn(*history, *pieces("s", n, whole=False)))
    n_prefilled = call.engine.n_prefilled
    assert kept(await call.turn(*history, *pieces("s", 4, whole=True)))
    assert call.engine.tokens == await built_anew(*history, *pieces("s", 4, whole=True))
    assert call.engine.n_prefilled - n_prefilled < 2 * N_PLACES + 8


async def test_a_withdrawn_utterance_is_truncated(call):
    history = await answered(call, HELLO)
    await call.prefill_turn(*history, *pieces("cough", 2, whole=False))
    state = await call.turn(*history, user("u1", "and then?"))
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history, user("u1", "and then?"))


async def test_a_turn_that_ended_earlier_than_it_seemed_keeps_its_first_pieces(call):
    history = await answered(call, HELLO)
    await call.prefill_turn(*history, *pieces("s", 3, whole=False))
    said = [*pieces("s", 3, whole=False)[:2], pieces("s", 3, whole=True)[2]]
    state = await call.turn(*history, *said)
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history, *said)


async def test_the_response_before_an_utterance_may_be_truncated_with_it(call):
    """The client tells late what it had heard when its user began to speak."""
    await call.turn(HELLO, key="r1")
    whole, heard = reply("r1", *call.reply[:-1]), reply("r1-heard", *call.reply[:1])
    await call.prefill_turn(HELLO, whole, *pieces("s", 2, whole=False))
    state = await call.turn(HELLO, heard, *pieces("s", 3, whole=True))
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(HELLO, heard, *pieces("s", 3, whole=True))


async def test_a_message_in_writing_may_come_with_the_first_piece(call):
    history = await answered(call, HELLO)
    written = user("u1", "look:")
    await call.prefill_turn(*history, written, *pieces("s", 2, whole=False))
    await call.turn(*history, written, user("u2", "never mind"))
    assert call.engine.tokens == await built_anew(*history, written, user("u2", "never mind"))


async def test_a_refused_withdrawal_rebuilds_the_session(call):
    history = await answered(call, HELLO)
    await call.prefill_turn(*history, *pieces("cough", 2, whole=False))
    call.engine.refuses = True
    state = await call.turn(*history, user("u1", "and then?"))
    assert state.rebuilt
    assert call.engine.tokens == await built_anew(*history, user("u1", "and then?"))


# --- answers that are begun in a pause ---


async def speculate(call: Call, *history: HistoryItem, **changes) -> list[HistoryItem]:
    """The history with the response of a speculative turn."""
    await call.turn(*history, key=f"speculate-{history[-1].key}", speculative=True, **changes)
    ids = call.reply[:-1] if len(call.reply) and call.state.ending is False else call.reply
    return [*history, reply(f"speculate-{history[-1].key}", *ids)]


async def test_a_confirmed_speculative_turn_is_kept(call):
    history = await speculate(call, *await answered(call, HELLO), user("u1", "and then?"))
    assert kept(await call.turn(*history, user("u2", "oh"), key="r2"))
    assert call.engine.tokens == await built_anew(*history, user("u2", "oh"))


WINDOW = RetentionConfig(window_tokens=20, slack_tokens=1)


async def test_what_a_speculative_turn_left_beyond_the_bound_is_dropped_by_the_next_turn(call):
    history: list[HistoryItem] = []
    for n in range(6):
        bound = {"retention": WINDOW, "drops_oldest": True}
        history = await speculate(call, *history, user(f"u{n}", "hello"), **bound)
        assert call.session.ledger.n_resident < 80
        gone = call.state.dropped
        assert not call.state.rebuilt
        assert gone == [item.key for item in history[: len(gone)]]
        history = history[len(gone) :]
    assert len(history) < 8
    ordinary = await call.turn(*history, user("last", "hello"), **bound)
    assert kept(ordinary)


async def test_while_a_speculative_turn_may_be_withdrawn_nothing_is_dropped(call):
    history: list[HistoryItem] = []
    for n in range(4):
        history = [*history, user(f"u{n}", "hello")]
        await call.turn(*history, key=f"r{n}", retention=WINDOW, drops_oldest=True)
        history.append(reply(f"r{n}", *call.reply[:-1]))
        gone = {*call.state.dropped, *await call.session.drop_old()}
        history = [item for item in history if item.key not in gone]
    before = list(call.engine.tokens)
    await speculate(call, *history, user("and", "and"), retention=WINDOW, drops_oldest=True)
    state = await call.turn(
        *history, user("then", "and then?"), retention=WINDOW, drops_oldest=True
    )
    assert state.truncated and not state.rebuilt and state.dropped == []
    assert call.engine.tokens[: len(before)] == before


async def test_a_withdrawn_speculative_turn_is_truncated(call):
    history = await answered(call, HELLO)
    await speculate(call, *history, user("u1", "and"))
    state = await call.turn(*history, user("u2", "and then?"))
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history, user("u2", "and then?"))


async def test_a_speculative_turn_may_be_withdrawn_while_it_generates(call):
    history = await answered(call, HELLO)
    call.end_at_token(1)
    await speculate(call, *history, user("u1", "and"))
    call.go_on()
    state = await call.turn(*history, user("u2", "and then?"))
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history, user("u2", "and then?"))


async def test_the_response_of_a_speculative_turn_may_be_truncated(call):
    history = await speculate(call, *await answered(call, HELLO), user("u1", "and then?"))
    history[-1] = reply("heard", *history[-1].token_ids[:1])
    state = await call.turn(*history, user("u2", "oh"))
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history, user("u2", "oh"))


async def test_a_withdrawn_speculative_turn_keeps_the_pieces_of_the_utterance(call):
    history = await answered(call, HELLO)
    await call.prefill_turn(*history, *pieces("s", 2, whole=False))
    n_prefilled = call.engine.n_prefilled
    await speculate(call, *history, *pieces("s", 3, whole=True))
    rest = pieces("s", 4, whole=True)
    await call.prefill_turn(*history, *rest[:3])
    assert kept(await call.turn(*history, *rest))
    assert call.engine.tokens == await built_anew(*history, *rest)
    assert call.engine.n_prefilled - n_prefilled < 4 * N_PLACES + 20


steps = st.lists(
    st.tuples(
        st.sampled_from(["say", "withdraw", "write", "cut", "right", "wrong", "wrong and cut"]),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    max_size=6,
)


@settings(max_examples=60)
@given(steps=steps)
async def test_after_any_turns_a_session_holds_its_history(steps):
    call, history = Call(), [HELLO]
    for n, (what, n_taken, n_said) in enumerate(steps):
        taken = pieces(f"s{n}", n_taken, whole=False) if what != "write" else []
        for i in range(len(taken)):
            await call.prefill_turn(*history, *taken[: i + 1])
        if what in ("right", "wrong", "wrong and cut"):
            said = [*taken, pieces(f"s{n}", len(taken) + 1, whole=True)[-1]]
            if n_said == 1:
                call.end_at_token(1)
            speculated = await speculate(call, *history, *said)
            call.go_on()
            if what == "right" and speculated[-1].token_ids:
                history = speculated
                continue
            if what == "wrong":
                taken = taken[:n_said]
        match what:
            case "say" | "wrong":
                used = taken[: n_said - 1]
                history += [*used, pieces(f"s{n}", len(used) + 1, whole=True)[-1]]
            case "cut" | "wrong and cut" if history[-1].token_ids:
                history[-1] = reply(f"cut{n}", *history[-1].token_ids[:1])
            case _:
                history.append(user(f"w{n}", "so?"))
        await call.turn(*history, key=f"r{n}")
        assert call.engine.tokens == [
            *await built_anew(*history),
        ]
        history.append(reply(f"r{n}", *call.reply[:-1]))


# --- conversations that do not fit, while the user speaks ---

TOLD = [reply(f"r{i}", 5, 6) if i % 2 else user(f"u{i}", "Once more.") for i in range(300)]
BOUNDS = {
    "window": {"retention": RetentionConfig(window_tokens=300, slack_tokens=50)},
    "context": {"max_tokens": LIMIT},
}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
async def test_what_does_not_fit_is_left_out_once_and_not_with_every_piece(call, bound):
    bound = bound | {"drops_oldest": True}
    first = await call.prefill_turn(*TOLD, *pieces("s", 1, whole=False), **bound)
    assert len(first.dropped) > 200
    for n in (2, 3, 4):
        n_prefilled = call.engine.n_prefilled
        state = await call.prefill_turn(*TOLD, *pieces("s", n, whole=False), **bound)
        assert kept(state) and state.dropped == first.dropped
        assert call.engine.n_prefilled - n_prefilled < 2 * N_PLACES + 8
    state = await call.turn(*TOLD, *pieces("s", 5, whole=True), **bound)
    assert kept(state) and state.dropped == first.dropped, "its owner has not been told before"
    left = TOLD[len(first.dropped) :]
    assert call.engine.tokens == await built_anew(*left, *pieces("s", 5, whole=True))


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
async def test_items_that_were_left_out_return_if_they_fit(call, bound):
    bound = bound | {"drops_oldest": True}
    few = TOLD[:6]
    loud = HistoryItem(key="s/0", role="user", parts=seconds(22), opens=True, closes=False)
    state = await call.prefill_turn(*few, loud, **bound)
    assert len(state.dropped) == 6
    state = await call.turn(*few, user("u", "Hi."), **bound)
    assert state.dropped == []
    assert call.engine.tokens == await built_anew(*few, user("u", "Hi."))


async def test_without_dropping_a_history_that_does_not_fit_is_an_error(call):
    await call.prefill_turn(
        *TOLD, *pieces("s", 1, whole=False), max_tokens=LIMIT, drops_oldest=True
    )
    with pytest.raises(ContextLengthError, match="The conversation is"):
        await call.turn(*TOLD, *pieces("s", 2, whole=True), max_tokens=LIMIT)
    state = await call.turn(*TOLD[-4:], user("u", "Hi."), max_tokens=LIMIT)
    assert state.dropped == [] and call.reply


async def test_speech_that_grows_beyond_the_context_fails_alone(call):
    bound = {"max_tokens": LIMIT, "drops_oldest": True}
    history = await answered(call, HELLO)
    begin, rest = (
        HistoryItem(key=f"l/{i}", role="user", parts=seconds(s), opens=i == 0, closes=i == 1)
        for i, s in enumerate((8, 30))
    )
    await call.prefill_turn(*history, begin, **bound)
    with pytest.raises(ContextLengthError, match="The newest message"):
        await call.turn(*history, begin, rest, **bound)
    state = await call.turn(*history, begin, rest, user("u", "Hi."), **bound)
    assert call.reply and state.dropped == ["u0", "r1", "l/0", "l/1"]
    assert call.engine.tokens == await built_anew(user("u", "Hi."))
