"""A session against its history: what is kept, cut, and built anew.

Whatever happened before, a session must hold the tokens that one built from the history alone
would hold.
"""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.errors import ContextLengthError
from sglang_live.kv.retention import RetentionConfig
from sglang_live.models.prompt import NO_OPENING, Opening
from sglang_live.stages.thinker.prompt_sizes import room_for_header, room_for_prompt
from sglang_live.stages.thinker.session import (
    Generated,
    Prefilled,
    Started,
    ThinkerSession,
    TurnState,
)
from test.unit.stages.fake_engine import N_PLACES, PROMPT, FakeEngine

pytestmark = pytest.mark.usefixtures("must_not_hang")


def user(key: str, *contents: str | int) -> HistoryItem:
    """Of texts and clips, the latter given by their length in samples."""
    parts = tuple(
        TextPart(c) if isinstance(c, str) else AudioPart(np.zeros(c, np.int16)) for c in contents
    )
    return HistoryItem(key=key, role="user", parts=parts)


def reply(key: str, *ids: int) -> HistoryItem:
    return HistoryItem(key=key, role="assistant", parts=(), token_ids=ids)


class Call:
    """A session and its engine. `turn` returns what became of one turn."""

    def __init__(self, *, truncates: bool = True):
        self.engine = FakeEngine()
        self.session = ThinkerSession(
            self.engine, PROMPT, "s", feed=self.engine, truncates=truncates
        )
        self.state = TurnState()
        self.events: list = []

    def think(
        self,
        *history: HistoryItem,
        key: str,
        instructions: str = "Be brief.",
        retention: RetentionConfig | None = None,
        opening: Opening = NO_OPENING,
        speculative: bool = False,
        max_tokens: int | None = None,
        drops_oldest: bool = False,
    ):
        self.state, self.events = TurnState(), []
        return self.session.think(
            instructions=instructions,
            history=list(history),
            item_key=key,
            sampling={"max_new_tokens": 100},
            state=self.state,
            retention=retention,
            opening=opening,
            speculative=speculative,
            max_tokens=max_tokens,
            drops_oldest=drops_oldest,
        )

    async def turn(self, *history: HistoryItem, key: str = "r", **changes) -> TurnState:
        async for event in self.think(*history, key=key, **changes):
            self.events.append(event)
        return self.state

    @property
    def reply(self) -> list[int]:
        return next((e.ids for e in reversed(self.events) if isinstance(e, Generated)), [])

    async def prefill_turn(self, *history: HistoryItem, **changes) -> TurnState:
        """What is being said, while it is: nothing is answered."""
        turn = self.think(*history, key="", **changes)
        self.state.ending = True
        async for event in turn:
            self.events.append(event)
        assert self.reply == []
        return self.state

    def end_at_token(self, n: int) -> None:
        self.engine.before_token = lambda at: at == n and self.session.interrupt(self.state)

    def end_at_request(self, n: int) -> None:
        """Before the n-th request from here on; the first of a new session is its header."""
        self._at_request(n, self.session.interrupt)

    def promote_at_request(self, n: int) -> None:
        self._at_request(n, self.session.promote)

    def _at_request(self, n: int, order: Callable[[TurnState], None]) -> None:
        seen = []

        def count(rid: str) -> None:
            seen.append(rid)
            if len(seen) == n:
                order(self.state)

        self.engine.before_request = count

    def go_on(self) -> None:
        self.engine.before_token = self.engine.before_request = lambda _: None


async def built_anew(*history: HistoryItem, **changes) -> list[int]:
    call = Call()
    await call.turn(*history, **changes)
    return call.engine.tokens


@pytest.fixture
def call() -> Call:
    return Call()


def kept(state: TurnState) -> bool:
    return not state.rebuilt and not state.truncated and not state.refused


FIRST, SECOND, THIRD = user("u1", "hello"), user("u2", "and then?"), user("u3", "oh")


# --- replies that stay ---


async def test_a_history_that_grew_is_appended(call):
    await call.turn(FIRST, key="r1")
    history = (FIRST, reply("r1", 5, 6, 7), SECOND)
    assert kept(await call.turn(*history))
    assert call.engine.tokens == await built_anew(*history)
    assert call.engine.truncations == []


async def test_an_interrupted_reply_stays_as_far_as_it_was_generated(call):
    call.end_at_token(2)
    await call.turn(FIRST, key="r1")
    assert call.reply == [5, 6]
    assert not call.session.lost
    call.go_on()
    history = (FIRST, reply("r1", 5, 6), SECOND)
    assert kept(await call.turn(*history))
    assert call.engine.tokens == await built_anew(*history)


async def test_the_same_tokens_under_another_name_are_no_change(call):
    await call.turn(FIRST, key="r1")
    history = (FIRST, reply("r1-edited", 5, 6, 7), SECOND)
    assert kept(await call.turn(*history))
    assert call.engine.tokens == await built_anew(*history)
    assert call.engine.truncations == []


# --- replies that were not heard to their end ---


@pytest.mark.parametrize("ended_at", [None, 2])
async def test_of_a_reply_that_was_cut_its_first_tokens_are_kept(call, ended_at):
    if ended_at is not None:
        call.end_at_token(ended_at)
    await call.turn(FIRST, key="r1")
    call.go_on()
    history = (FIRST, reply("r1-cut", 5), SECOND)
    state = await call.turn(*history)
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history)
    assert call.session.ledger.keys == ["u1", "r1-cut", "u2", "r"]


async def test_an_unheard_response_is_truncated_with_the_markup_before_it(call):
    await call.turn(FIRST, key="r1")
    state = await call.turn(FIRST, SECOND)
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(FIRST, SECOND)


async def test_a_repeated_turn_truncates_the_old_response(call):
    await call.turn(FIRST, key="r1")
    assert (await call.turn(FIRST, key="r2")).truncated
    assert call.engine.tokens == await built_anew(FIRST)
    assert call.session.ledger.keys == ["u1", "r2"]


@pytest.mark.parametrize(
    "other",
    [
        reply("r1-other", 9, 9),
        reply("r1-other", 5, 6, 7, 8),
        reply("r1-other"),
        HistoryItem(key="r1-other", role="assistant", parts=(TextPart("better"),)),
        HistoryItem(key="odd", role="user", parts=(), token_ids=(5, 6)),
    ],
    ids=["other tokens", "more tokens", "no tokens", "text", "another role"],
)
async def test_another_reply_in_its_place_is_appended_like_any_item(call, other):
    await call.turn(FIRST, key="r1")
    history = (FIRST, other, SECOND)
    state = await call.turn(*history)
    assert state.truncated and not state.rebuilt
    assert call.engine.tokens == await built_anew(*history)


async def test_every_response_of_a_session_may_be_truncated(call):
    history: list[HistoryItem] = []
    for n in range(4):
        history.append(user(f"u{n}", f"question {n}", 800))
        state = await call.turn(*history, key=f"r{n}")
        assert state.truncated == (n > 0) and not state.rebuilt
        assert call.engine.tokens == await built_anew(*history)
        history.append(reply(f"r{n}-cut", 5, 6))


async def test_how_many_places_a_clip_has_is_known_after_a_truncation(call):
    await call.turn(FIRST, key="r1")
    await call.turn(FIRST, reply("r1-cut", 5), user("u2", 800))
    [heard] = [e for e in call.events if isinstance(e, Prefilled) and e.append.clips]
    assert heard.n_new == len(PROMPT.markup_ids(heard.append.text)) - 1 + N_PLACES


# --- sessions that must be built anew ---


@pytest.mark.parametrize(
    "history",
    [
        (user("u1-edited", "hi"), reply("r1", 5, 6, 7), SECOND),
        (reply("r1", 5, 6, 7), SECOND),
        (SECOND,),
        (user("u0", "before"), FIRST, SECOND),
    ],
    ids=["edited", "first deleted", "all new", "inserted"],
)
async def test_a_history_that_changed_elsewhere_rebuilds(call, history):
    await call.turn(FIRST, key="r1")
    state = await call.turn(*history)
    assert state.rebuilt and not state.truncated
    assert call.engine.tokens == await built_anew(*history)


async def test_a_change_before_the_last_reply_rebuilds_even_when_that_was_cut(call):
    await call.turn(FIRST, key="r1")
    await call.turn(FIRST, reply("r1", 5, 6, 7), SECOND, key="r2")
    history = (FIRST, reply("r1-cut", 5), SECOND, reply("r2-cut", 5, 6), THIRD)
    assert (await call.turn(*history)).rebuilt
    assert call.engine.tokens == await built_anew(*history)


async def test_new_instructions_rebuild(call):
    await call.turn(FIRST, key="r1")
    assert (await call.turn(FIRST, SECOND, instructions="Be long.")).rebuilt
    assert call.engine.tokens == await built_anew(FIRST, SECOND, instructions="Be long.")


async def test_an_engine_that_refuses_to_truncate_rebuilds(call):
    await call.turn(FIRST, key="r1")
    call.engine.refuses = True
    history = (FIRST, reply("r1-cut", 5), SECOND)
    state = await call.turn(*history)
    assert (state.refused, state.rebuilt, state.truncated) == (True, True, False)
    assert call.engine.tokens == await built_anew(*history)  # and the old session is closed


async def test_without_truncation_a_cut_reply_rebuilds():
    call = Call(truncates=False)
    await call.turn(FIRST, key="r1")
    history = (FIRST, reply("r1-cut", 5), SECOND)
    state = await call.turn(*history)
    assert state.rebuilt and not state.refused
    assert call.engine.tokens == await built_anew(*history)


def tell(call: Call, *items: HistoryItem) -> None:
    """The talker has them, as after turns that prefilled them."""
    for item in items:
        clips = [part for part in item.parts if isinstance(part, AudioPart)]
        call.session.told[item.key] = [N_PLACES] * len(clips)


@pytest.mark.parametrize(
    ("words", "n_requests"),
    [("and this:", 2), ("and <|im_end|> this:", 7)],
    ids=["words", "markup"],
)
async def test_a_conversation_that_the_talker_has_is_built_anew_in_one_request(words, n_requests):
    call = Call(truncates=False)
    said = (user("u1", "listen:", 800), reply("r1-cut", 300), user("u2", words, 1600))
    tell(call, said[0], said[2])
    new = (reply("r2-cut", 301), user("u3", 800))
    await call.turn(*said, *new)
    assert call.engine.tokens == await built_anew(*said, *new)
    # Words that would be read as markup: one for the header, each clip, and each text before one.
    assert len(call.engine.rids) == n_requests
    assert call.session.ledger.keys == ["u1", "r1-cut", "u2", "r2-cut", "u3", "r"]


@pytest.mark.parametrize("retention", [None, RetentionConfig(window_tokens=64)])
async def test_a_history_that_a_client_has_written_is_one_request_and_goes_to_the_talker(retention):
    call = Call()
    answer = HistoryItem(key="a1", role="assistant", parts=(TextPart("It rains."),))
    before, asked = (user("u1", "what is the weather"), answer), user("u2", "and tomorrow", 800)
    await call.turn(*before, asked, retention=retention)
    assert call.engine.tokens == await built_anew(*before, asked)
    # The history, the text of the question, its clip with the response.
    assert len(call.engine.rids) == 3
    [started] = [event for event in call.events if isinstance(event, Started)]
    assert [item.key for item in started.items] == ["u1", "a1", "u2"]
    await call.turn(*before, asked, reply("r", 300), user("u3", "thanks"), retention=retention)
    [started] = [event for event in call.events if isinstance(event, Started)]
    assert "a1" not in [item.key for item in started.items]


async def test_a_written_history_that_a_compaction_would_cut_is_prefilled_behind_the_header():
    call = Call()
    answer = HistoryItem(key="a1", role="assistant", parts=(TextPart("many words " * 30),))
    sizes: list[int] = []
    call.engine.before_request = lambda rid: sizes.append(call.engine.n_prefilled)
    few = RetentionConfig(window_tokens=16)
    await call.turn(user("u1", "what"), answer, user("u2", "and"), retention=few)
    assert sizes[1] == PROMPT.n_tokens(PROMPT.header("Be brief."), iter(()))


async def test_what_the_talker_has_may_be_too_long_for_one_request():
    call = Call(truncates=False)
    said = [user(f"u{n}", "many words " * 30) for n in range(8)]
    tell(call, *said)
    limit = sum(map(len_of, said)) + 60
    await call.turn(*said, max_tokens=limit, drops_oldest=True)
    assert call.state.dropped and len(call.engine.tokens) < limit


def len_of(item: HistoryItem) -> int:
    return PROMPT.n_tokens(PROMPT.item(item), iter(()))


async def test_a_turn_that_was_cut_off_loses_the_session(call):
    await call.turn(FIRST, key="r1")
    async with aclosing(call.think(FIRST, SECOND, key="r2")) as events:
        async for event in events:
            if isinstance(event, Generated):
                break
    assert call.session.lost and call.engine.sessions == {}
    assert (await call.turn(FIRST, SECOND)).rebuilt
    assert call.engine.tokens == await built_anew(FIRST, SECOND)


async def test_a_turn_cancelled_while_it_truncates_loses_the_session(call):
    await call.turn(FIRST, key="r1")
    asked = asyncio.Event()

    async def never(*_):
        asked.set()
        await asyncio.Event().wait()

    call.engine.truncate = never
    turn = asyncio.create_task(call.turn(FIRST, SECOND))
    await asked.wait()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert call.session.lost and call.engine.sessions == {}
    assert (await call.turn(FIRST, SECOND)).rebuilt


async def test_a_session_that_fails_to_open_is_closed(call):
    def fail(rid: str) -> None:
        raise RuntimeError("full")

    call.engine.before_request = fail
    with pytest.raises(RuntimeError):
        await call.turn(FIRST)
    assert call.engine.sessions == {}
    call.go_on()
    await call.turn(FIRST)
    assert call.engine.tokens == await built_anew(FIRST)


# --- turns that are ended before they generate ---

CLIPS = user("u1", "listen:", 800, "and", 1600)


@pytest.mark.parametrize("history", [(CLIPS,), (CLIPS, user("u2", "so?"))], ids=["clip", "text"])
@pytest.mark.parametrize("at", [2, 3])
async def test_an_interrupted_turn_prefills_its_prompt_and_generates_nothing(call, history, at):
    call.end_at_request(at)
    await call.turn(*history, key="r1")
    assert call.reply == [] and not any(isinstance(e, Generated) for e in call.events)
    clips = [e for e in call.events if isinstance(e, Prefilled) and e.append.clips]
    assert len(clips) == 2
    call.go_on()
    n_prefilled = call.engine.n_prefilled
    assert kept(await call.turn(*history, THIRD))
    assert call.engine.tokens == await built_anew(*history, THIRD)
    assert call.engine.n_prefilled - n_prefilled < 20, "the clips were heard once"


@pytest.mark.parametrize("at", [2, 3, 4])
async def test_a_forced_opening_is_no_part_of_the_prompt(call, at):
    """The reply is to begin with a call: that too is asked for behind the clips, or not at all."""
    call.end_at_request(at)
    await call.turn(user("u1", 800, 1600), key="r1", opening=Opening((7, 8), "<call>"))
    call.go_on()
    ended = reply("r1", *call.reply) if call.reply else None
    history = [item for item in (user("u1", 800, 1600), ended, THIRD) if item]
    await call.turn(*history)
    assert call.engine.tokens == await built_anew(*history)


async def test_the_empty_reply_may_be_in_the_history(call):
    call.end_at_request(2)
    await call.turn(CLIPS, key="r1")
    call.go_on()
    history = (CLIPS, reply("r1"), THIRD)
    assert kept(await call.turn(*history))
    assert call.engine.tokens == await built_anew(*history)


async def test_a_turn_with_nothing_new_that_is_ended_at_once_changes_nothing(call):
    call.end_at_request(2)
    await call.turn(CLIPS, key="r1")
    tokens = list(call.engine.tokens)
    call.go_on()
    turn = call.think(CLIPS, key="r2")
    call.session.interrupt(call.state)
    assert not any([isinstance(event, Generated) async for event in turn])
    assert call.engine.tokens == tokens


async def test_a_reply_ended_while_its_own_request_is_prefilled_is_empty(call):
    call.end_at_token(0)
    await call.turn(FIRST, key="r1")
    assert call.reply == []
    call.go_on()
    assert (await call.turn(FIRST, SECOND)).truncated
    assert call.engine.tokens == await built_anew(FIRST, SECOND)


# --- sessions with a bound ---

WINDOW = RetentionConfig(window_tokens=20, slack_tokens=1)


async def long_call(call: Call, n_turns: int, retention=WINDOW) -> list[HistoryItem]:
    """Turns of about ten tokens each."""
    history: list[HistoryItem] = []
    for n in range(n_turns):
        history.append(user(f"u{n}", "hello"))
        await call.turn(*history, key=f"r{n}", retention=retention)
        history.append(reply(f"r{n}", 5, 6, 7))
    return history


async def test_a_short_session_keeps_all_without_an_order(call):
    await long_call(call, 3, retention=RetentionConfig())
    call.engine.refuses = True
    assert await call.session.drop_old() == []
    assert not call.session.lost


async def test_the_engine_is_told_of_a_bound_once_and_when_it_changes(call):
    history = await long_call(call, 2)
    wider = RetentionConfig(sink_tokens=3, window_tokens=30, slack_tokens=1)
    for retention in (wider, wider, None, None):
        await call.turn(*history, SECOND, retention=retention)
    told = [(b.sink_tokens, b.window_tokens) for b in call.engine.bounds]
    assert told == [(call.session.ledger.n_header, 20), (3, 30), (0, 0)]
    assert await call.session.drop_old() == []


async def test_long_instructions_leave_less_of_the_conversation(call):
    suited = RetentionConfig(window_tokens=60, slack_tokens=2, within_tokens=100)
    windows = []
    for n_sentences in (1, 200):
        instructions = " ".join(["Be brief."] * n_sentences)
        await call.turn(user("u", "hello"), key="r", instructions=instructions, retention=suited)
        bound = call.engine.bounds[-1]
        assert bound.sink_tokens == call.session.ledger.n_header
        windows.append(bound.window_tokens)
    assert windows == [60, 15]


async def test_dropped_items_are_named_and_the_session_continues(call):
    history = await long_call(call, 4)
    whole = list(call.engine.tokens)
    gone = await call.session.drop_old()
    n_header = call.session.ledger.n_header
    assert call.engine.tokens == whole[:n_header] + whole[-20:]
    assert gone and gone == [item.key for item in history[: len(gone)]]
    left = history[len(gone) :]
    # The first of those that are left may have lost its beginning; a whole one more would not fit.
    assert len(await built_anew(*left[1:-1])) - n_header < 20
    assert kept(await call.turn(*left, SECOND, retention=WINDOW))
    assert call.engine.tokens[n_header : n_header + 20] == whole[-20:]
    assert await call.session.drop_old() != []


async def test_after_compaction_a_response_can_still_be_truncated(call):
    history = await long_call(call, 4)
    gone = await call.session.drop_old()
    left = [*history[len(gone) : -1], reply("heard", 5), SECOND]
    n_before = len(call.engine.tokens)
    assert (await call.turn(*left)).truncated
    tail = await built_anew(*history[:-1], reply("heard", 5), SECOND)
    assert call.engine.tokens[-(n_before - 20) :] == tail[-(n_before - 20) :]


async def test_a_sink_may_reach_over_the_first_items(call):
    await long_call(call, 1)
    sink = RetentionConfig(
        sink_tokens=call.session.ledger.items[0].end, window_tokens=20, slack_tokens=1
    )
    history = await long_call(call, 4, retention=sink)
    gone = await call.session.drop_old()
    assert history[0].key not in gone and history[1].key in gone
    assert kept(await call.turn(*(item for item in history if item.key not in gone), SECOND))


async def test_clips_count_as_many_tokens_as_they_became(call):
    await call.turn(CLIPS, key="r1")
    assert [item.end for item in call.session.ledger.items] == [
        len(await built_anew(CLIPS)) - len(PROMPT.markup_ids("assistant\n")) - 4,
        call.session.ledger.n_tokens,
    ]


async def test_a_session_in_an_unknown_state_is_rebuilt(call):
    history = await long_call(call, 4)
    call.engine.refuses = True
    assert await call.session.drop_old() == []
    call.engine.refuses = False
    state = await call.turn(*history, SECOND)
    assert state.rebuilt
    assert call.engine.tokens == await built_anew(*history, SECOND)


LIMIT = 400  # of the whole prompt, in tokens


@pytest.mark.parametrize("n_paused", [0, 2])
async def test_a_history_that_does_not_fit_loses_its_oldest_items_and_the_next_turn_works(n_paused):
    call = Call()
    items = [user(f"u{i}", f"{i} is a number among others") for i in range(60)]
    if n_paused:
        await call.turn(*items[:n_paused], max_tokens=LIMIT, drops_oldest=True)
    state = await call.turn(*items[n_paused:], key="r1", max_tokens=LIMIT, drops_oldest=True)
    dropped = len(state.dropped)
    assert 0 < dropped < 60 - n_paused
    assert state.dropped == [item.key for item in items[n_paused:][:dropped]]
    assert len(call.engine.tokens) <= LIMIT
    kept = items[n_paused:][dropped:]
    assert call.session.ledger.keys == [*(item.key for item in kept), "r1"]
    state = await call.turn(*kept, reply("r1", 5, 6, 7), user("new", "And?"), max_tokens=LIMIT)
    assert not state.dropped and not state.rebuilt


@pytest.mark.parametrize("drops_oldest", [True, False])
async def test_a_last_message_that_is_too_long_fails_its_turn_alone(drops_oldest):
    call = Call()
    await call.turn(user("a", "Hello."), key="r", max_tokens=LIMIT, drops_oldest=drops_oldest)
    before, long = list(call.engine.tokens), user("b", "long " * 1000)
    with pytest.raises(ContextLengthError, match="at most"):
        history = user("a", "Hello."), reply("r", 5, 6, 7), long
        await call.turn(*history, key="s", max_tokens=LIMIT, drops_oldest=drops_oldest)
    assert call.engine.tokens == before
    state = await call.turn(long, user("c", "Hi."), max_tokens=LIMIT, drops_oldest=True)
    assert state.dropped == ["b"] and call.reply


def words_of(key: str, role: str, n_words: int) -> HistoryItem:
    return HistoryItem(key=key, role=role, parts=(TextPart("word " * n_words),))


async def test_a_conversation_that_may_lose_nothing_fails_until_an_item_is_deleted():
    call = Call()
    items = [words_of(f"u{i}", "user", 20) for i in range(20)]
    for _ in range(2):
        with pytest.raises(ContextLengthError, match="The conversation is"):
            await call.turn(*items, max_tokens=LIMIT)
    left = items[12:]
    assert (await call.turn(*left, key="r", max_tokens=LIMIT)).dropped == []
    state = await call.turn(*left, reply("r", 5, 6, 7), FIRST, max_tokens=LIMIT)
    assert kept(state) and call.reply


@pytest.mark.parametrize(
    ("history", "dropped"),
    [
        ([("call", "assistant", 4), ("u", "user", 280), ("output", "tool", 60)], ["call"]),
        ([("call", "assistant", 4), ("output", "tool", 290), ("u", "user", 50)], ["call"]),
        ([("u", "user", 250), ("call", "assistant", 9), ("output", "tool", 100)], ["u"]),
        ([("u", "user", 250), ("output", "tool", 100), ("call", "assistant", 9)], ["u"]),
        ([("call", "assistant", 300), ("output", "tool", 100)], ["call"]),
        ([("output", "tool", 300), ("call", "assistant", 100)], ["output"]),
    ],
)
async def test_a_call_and_its_output_may_be_parted(history, dropped):
    call, items = Call(), [words_of(*item) for item in history]
    bound = {"max_tokens": LIMIT, "drops_oldest": True}
    state = await call.turn(*items, key="r", **bound)
    assert call.reply and state.dropped[: len(dropped)] == dropped
    left = [item for item in items if item.key not in state.dropped]
    state = await call.turn(*left, reply("r", 5, 6, 7), FIRST, **bound)
    assert call.reply and not state.rebuilt


@pytest.mark.parametrize("window_tokens", [1, 64, LIMIT, 1_000_000])
async def test_with_any_window_a_conversation_of_any_length_gets_responses(window_tokens):
    call, history = Call(), []
    bound = {"max_tokens": LIMIT, "drops_oldest": True}
    bound["retention"] = RetentionConfig(window_tokens=window_tokens, slack_tokens=1)
    for n in range(12):
        history += [words_of(f"u{n}", "user", 60), words_of(f"t{n}", "tool", 30)]
        state = await call.turn(*history, key=f"r{n}", **bound)
        assert call.reply and len(call.engine.tokens) <= LIMIT
        history.append(reply(f"r{n}", *call.reply[:-1]))
        gone = {*state.dropped, *await call.session.drop_old()}
        history = [item for item in history if item.key not in gone]
    assert len(history) < 36


async def test_instructions_that_are_too_long_fail_the_turn_and_keep_the_session():
    call = Call()
    await call.turn(user("a", "Hello."), max_tokens=LIMIT, drops_oldest=True)
    before = list(call.engine.tokens)
    with pytest.raises(ContextLengthError, match="instructions"):
        await call.turn(user("a", "Hello."), instructions="x " * 1000, max_tokens=LIMIT)
    assert call.engine.tokens == before
    room = room_for_header(room_for_prompt(LIMIT))
    full = "x " * ((room - 20) // len(PROMPT.words(" x x")) * 2)
    state = await call.turn(user("a", "Hello."), instructions=full, max_tokens=LIMIT)
    assert state.dropped == [] and call.reply and call.session.ledger.n_header > room * 0.7


async def test_a_thousand_short_messages_are_one_prefill():
    call = Call()
    await call.turn(*[user(f"u{i}", "One more word.") for i in range(1000)])
    assert sum(isinstance(event, Prefilled) for event in call.events) == 1


async def test_every_request_of_a_session_carries_its_owners_salt():
    call = Call()
    turn = call.session.think(
        instructions="Be brief.",
        history=[user("a", "Listen:", 1600, "What was it?")],
        item_key="r",
        sampling={"max_new_tokens": 4},
        state=TurnState(),
        cache_salt="of one owner",
    )
    async for _ in turn:
        pass
    assert len(call.engine.salts) >= 3 and set(call.engine.salts) == {"of one owner"}


async def test_of_a_replayed_conversation_only_the_window_and_what_is_new_is_prefilled():
    call, window = Call(), RetentionConfig(window_tokens=300, slack_tokens=50)
    told = [user(f"u{i}", "Once more.") if i % 2 else reply(f"r{i}", 5, 6) for i in range(1000)]
    new = [user("tool", "result " * 200), user("asked", "Well?")]
    state = await call.turn(*told[1:], *new, retention=window, drops_oldest=True)
    n_new = len(PROMPT.words("result " * 200))
    assert n_new > 350, "what was not answered yet stays, though it exceeds the window"
    assert n_new < len(call.engine.tokens) < n_new + 350
    assert call.session.ledger.keys[-3:] == ["tool", "asked", "r"]
    assert state.dropped and state.dropped == [i.key for i in told[1:]][: len(state.dropped)]
