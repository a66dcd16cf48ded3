"""KV that is lost is computed while the user begins to speak; KV that is there is left alone."""

import pytest

from sglang_live.ids import THINK_PREFIX, TURN_PREFILL_PREFIX
from sglang_live.stages.thinker.preheat import Preheats
from sglang_live.stages.thinker.session import TurnState

from .test_session import Call, built_anew, call, kept, reply, user

__all__ = ["call"]

pytestmark = pytest.mark.usefixtures("must_not_hang")

HELLO, MORE = user("u0", "hello " * 40), user("u1", 800, "and more")


async def answered(call: Call, *history):
    """The history with the response to it."""
    await call.turn(*history, key="r1")
    return [*history, reply("r1", *call.reply[:-1])]


async def preheat(call: Call, preheats: Preheats, *history, instructions="Be brief.") -> TurnState:
    """As the stage does at the beginning of speech."""
    turn = call.think(*history, key="", instructions=instructions)
    call.state.ending = call.state.prefill_only = True
    if await preheats.begin(call.session, instructions, history, False, call.state):
        async for event in turn:
            call.events.append(event)
    preheats.ended(call.session)
    return call.state


@pytest.fixture
def preheats() -> Preheats:
    return Preheats()


async def lose(call: Call) -> None:
    await call.session.lose()


async def test_a_lost_session_is_built_anew_and_the_turn_prefills_its_message_only(call, preheats):
    history = await answered(call, HELLO)
    await lose(call)
    n_requests = len(call.engine.rids)
    await preheat(call, preheats, *history)
    assert (await built_anew(*history))[: len(call.engine.tokens)] == call.engine.tokens
    assert all(rid.startswith(TURN_PREFILL_PREFIX) for rid in call.engine.rids[n_requests:])
    assert call.engine.speaking == [call.session.engine_session]
    n_prefilled = call.engine.n_prefilled
    assert kept(await call.turn(*history, MORE))
    preheats.used("s", call.state.rebuilt)
    assert call.engine.n_prefilled - n_prefilled < 30
    assert call.engine.tokens == await built_anew(*history, MORE)
    assert preheats.counts == {
        "preheats": 1,
        "preheats_evicted": 0,
        "preheats_needless": 0,
        "preheats_unused": 0,
    }


async def test_the_first_turn_finds_its_instructions_computed(call, preheats):
    await preheat(call, preheats, instructions="Be brief.")
    [rid] = call.engine.rids
    assert rid.startswith(TURN_PREFILL_PREFIX) and preheats.counts["preheats"] == 1
    await preheat(call, preheats, instructions="Be brief.")
    assert len(call.engine.rids) == 1 and preheats.counts["preheats_needless"] == 1
    await call.turn(HELLO)
    preheats.used("s", call.state.rebuilt)
    assert len(call.engine.rids) == 2 and preheats.counts["preheats_unused"] == 0
    assert call.engine.tokens == await built_anew(HELLO)


async def test_a_session_that_holds_the_history_gets_no_request(call, preheats):
    history = await answered(call, HELLO)
    n_requests, ledger = len(call.engine.rids), call.session.ledger
    await preheat(call, preheats, *history)
    assert len(call.engine.rids) == n_requests and call.session.ledger == ledger
    assert preheats.counts["preheats_needless"] == 1


async def test_a_response_that_was_heard_in_part_is_left_to_the_turn(call, preheats):
    history = await answered(call, HELLO)
    cut = [*history[:-1], reply("r1-heard", *call.reply[:1])]
    await preheat(call, preheats, *cut)
    assert preheats.counts["preheats_needless"] == 1
    assert not call.engine.truncations


async def test_evicted_kv_is_computed_and_the_session_holds_what_it_held(call, preheats):
    history = await answered(call, HELLO)
    tokens, ledger = list(call.engine.tokens), call.session.ledger
    n_requests, call.engine.left_after_eviction = len(call.engine.rids), 5
    await preheat(call, preheats, *history)
    assert call.engine.tokens == tokens and call.session.ledger == ledger
    [rid] = call.engine.rids[n_requests:]
    assert rid.startswith(TURN_PREFILL_PREFIX)
    assert preheats.counts["preheats_evicted"] == 1
    cut = [*history[:-1], reply("r1-heard", *call.reply[:1])]
    state = await call.turn(*cut, MORE)
    assert state.truncated and not state.rebuilt


async def test_little_evicted_kv_is_left_to_the_turn(call, preheats):
    history = await answered(call, HELLO)
    call.engine.left_after_eviction = len(call.engine.tokens) - 60
    await preheat(call, preheats, *history)
    assert preheats.counts["preheats_needless"] == 1


async def test_an_engine_that_does_not_tell_gets_no_request(call, preheats):
    history = await answered(call, HELLO)
    call.engine.answers = False
    n_requests = len(call.engine.rids)
    await preheat(call, preheats, *history)
    assert len(call.engine.rids) == n_requests


async def test_a_refused_truncation_costs_the_session(call, preheats):
    history = await answered(call, HELLO)
    call.engine.left_after_eviction, call.engine.refuses = 5, True
    await preheat(call, preheats, *history)
    assert call.session.lost and call.session.engine_session is None
    call.engine.refuses = False
    await call.turn(*history, MORE)
    preheats.used("s", call.state.rebuilt)
    assert preheats.counts["preheats_unused"] == 1


async def test_a_turn_that_waits_goes_before_other_requests(call, preheats):
    history = await answered(call, HELLO, MORE)
    await lose(call)
    call.promote_at_request(2)
    n_requests = len(call.engine.rids)
    await preheat(call, preheats, *history)
    waits, *behind = call.engine.rids[n_requests + 1 :]
    assert call.engine.promoted == [waits]
    assert behind and all(rid.startswith(THINK_PREFIX) for rid in behind)


async def test_a_preheat_whose_session_closes_or_is_built_anew_was_in_vain(call, preheats):
    history = await answered(call, HELLO)
    await lose(call)
    await preheat(call, preheats, *history)
    preheats.closed("s")
    preheats.closed("s")
    assert preheats.counts["preheats_unused"] == 1
