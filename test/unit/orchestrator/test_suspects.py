"""What was in an engine when it died is refused for a while, and nothing else."""

import itertools
from contextlib import ExitStack

import numpy as np
import pytest

from sglang_live.clock import SimClock
from sglang_live.core import AudioPart, HistoryItem, TextPart, Tools, TurnRequest
from sglang_live.orchestrator.suspects import (
    BROKEN_BEFORE_S,
    DEATHS,
    KEPT_S,
    SuspectError,
    Suspects,
    TurnContent,
    digest,
)

KILLER, BESIDE, OTHER = digest(b"killer"), digest(b"beside"), digest(b"other")
_keys = itertools.count()


@pytest.fixture
def clock():
    return SimClock()


@pytest.fixture
def suspects(clock):
    return Suspects(clock)


def refuses(suspects: Suspects, content: bytes) -> bool:
    try:
        suspects.check(content)
    except SuspectError:
        return True
    return False


def test_one_death_refuses_nothing(suspects, clock):
    with suspects.turn("t1", KILLER):
        suspects.died("thinker/0", ["t1-think"])
    assert (suspects.n_suspected, suspects.n_refused) == (1, 0)
    assert not refuses(suspects, KILLER)
    clock.advance(KEPT_S)
    with suspects.turn("t2", KILLER):
        suspects.died("thinker/0", ["t2-think"])
    assert not refuses(suspects, KILLER), "the first one was too long ago"


def test_of_48_requests_beside_the_cause_none_is_refused(suspects):
    contents = [digest(bytes([n])) for n in range(48)]
    with ExitStack() as turns:
        for n, content in enumerate(contents):
            turns.enter_context(suspects.turn(f"t{n}", content))
        suspects.died("thinker/0", [f"t{n}-think" for n in range(48)])
    with suspects.turn("again", contents[0]):
        suspects.died("thinker/1", ["again-think"])
    assert [refuses(suspects, content) for content in contents] == [True, *[False] * 47]


def test_a_turn_with_which_an_engine_died_twice_is_refused_for_ten_minutes(suspects, clock):
    for turn_id in ("t1", "t1b"):
        with suspects.turn(turn_id, KILLER):
            suspects.died("thinker/0", [f"{turn_id}-think"])
    assert (suspects.n_suspected, suspects.n_refused) == (2, 0)
    clock.advance(KEPT_S - 1)
    with pytest.raises(SuspectError) as refused, suspects.turn("t2", KILLER):
        pass
    # 400 is not repeated by clients, unlike 408, 409, 429 and 5xx.
    assert (refused.value.http_status, refused.value.retry_after_s) == (400, None)
    assert suspects.n_refused == 1
    clock.advance(1)
    with suspects.turn("t3", KILLER):
        pass


def test_what_was_not_in_that_engine_is_served(suspects):
    with suspects.turn("over", OTHER):
        pass
    with suspects.turn("speaking", BESIDE), suspects.turn("t", KILLER):
        # Its thinker is done: when the thinker dies, only its talker has work of it.
        for _ in range(DEATHS):
            suspects.died("thinker/0", ["t-think", "unknown-think"])
    assert [refuses(suspects, content) for content in (KILLER, BESIDE, OTHER)] == [True, 0, 0]


def test_a_request_of_the_native_api_is_suspect_in_its_own_engine_only(suspects):
    for _ in range(DEATHS):
        killer = suspects.begin("thinker/0", KILLER)
        beside = suspects.begin("thinker/1", BESIDE)
        suspects.end(suspects.begin("thinker/0", OTHER))
        suspects.died("thinker/0", [])
        for request in (killer, beside):
            suspects.end(request, broken=True)
    assert [refuses(suspects, content) for content in (KILLER, BESIDE, OTHER)] == [True, 0, 0]


@pytest.mark.parametrize(("before_s", "suspected"), [(1, True), (BROKEN_BEFORE_S + 1, False)])
def test_a_connection_may_break_before_the_death_is_noticed(suspects, clock, before_s, suspected):
    for _ in range(DEATHS):
        suspects.end(suspects.begin("thinker/0", KILLER), broken=True)
        clock.advance(before_s)
        suspects.died("thinker/0", [])
    assert refuses(suspects, KILLER) is suspected


def test_a_second_death_suspects_only_requests_since_the_first(suspects, clock):
    suspects.end(suspects.begin("thinker/0", KILLER), broken=True)
    suspects.died("thinker/0", [])
    clock.advance(KEPT_S)
    suspects.died("thinker/0", [])
    assert suspects.n_suspected == 1 and not refuses(suspects, KILLER)


def test_memory_is_bounded_and_the_oldest_is_dropped(clock):
    suspects = Suspects(clock, max_kept=3)
    for n in range(5):
        with suspects.turn("t", digest(bytes([n]))):
            for _ in range(DEATHS):
                suspects.died("thinker/0", ["t-think"])
    assert [refuses(suspects, digest(bytes([n]))) for n in range(5)] == [0, 0, True, True, True]
    assert not suspects._turns and not suspects._requests


# --- what counts as the same content ---


def item(*parts, role="user", **fields) -> HistoryItem:
    return HistoryItem(key=f"k{next(_keys)}", role=role, parts=parts, **fields)


def turn(*items: HistoryItem, **fields) -> TurnRequest:
    asked = {"turn_id": f"t{next(_keys)}", "instructions": "", "voice": "a", "history": items}
    return TurnRequest(**(asked | fields))


def text_turn(text: str = "hello", **fields) -> TurnRequest:
    return turn(item(TextPart(text)), **fields)


def sound(*samples: int) -> AudioPart:
    return AudioPart(np.array(samples, np.int16))


def test_the_same_content_under_other_names_is_the_same():
    first, again = TurnContent().of(text_turn()), TurnContent().of(text_turn(stateless=True))
    assert first == again == TurnContent().of(text_turn(prefill_only=True))
    assert TurnContent().of(turn(item(sound(1, 2)))) == TurnContent().of(turn(item(sound(1, 2))))


def test_any_difference_for_the_engine_is_another_content():
    turns = [
        text_turn(),
        text_turn("hello "),
        text_turn("\ud800"),
        text_turn(instructions="Be brief."),
        text_turn(voice="b"),
        text_turn(temperature=0.5),
        text_turn(max_output_tokens=4),
        text_turn(seed=1),
        text_turn(wants_audio=False),
        text_turn(script="hello"),
        text_turn(tools=Tools(functions=("{}",))),
        text_turn(tools=Tools(functions=("{}",), must_call="")),
        turn(item(TextPart("hello"), role="system")),
        turn(item(TextPart("hel"), TextPart("lo"))),
        turn(item(TextPart("hel")), item(TextPart("lo"))),
        turn(item(sound(1, 2))),
        turn(item(sound(2, 1))),
        turn(item(sound(1, 2), TextPart("hello"))),
        turn(item(TextPart("hello"), role="assistant", token_ids=(1, 2))),
        turn(item(TextPart("hello"), role="assistant", token_ids=(1, 3))),
        turn(),
    ]
    contents = [TurnContent().of(asked) for asked in turns]
    assert len(set(contents)) == len(turns)


def test_an_item_is_hashed_once_however_often_it_is_asked_with(monkeypatch):
    from sglang_live.orchestrator import suspects as module

    hashed, content, said = [], TurnContent(), [item(sound(n)) for n in range(3)]
    original = module._item
    monkeypatch.setattr(module, "_item", lambda one: hashed.append(one.key) or original(one))
    for n in (1, 2, 3):
        content.of(turn(*said[:n]))
    assert hashed == [one.key for one in said]
    assert content.of(turn(*said)) == TurnContent().of(turn(*said))
