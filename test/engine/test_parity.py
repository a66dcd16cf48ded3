"""Thinker and talker have transformers' tokens and codes, with SGLang's default scheduling."""

import pytest

from sglang_live.core import HistoryItem, TextPart
from test.engine import parity_claims
from test.engine.reference import chat
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]


async def test_thinker_matches_the_reference_on_text(stages, reference):
    text = "tell me about the river and the bridge"
    expected = reference.think(reference.inputs(chat("Be brief.", ("user", text)), []), 32)
    links = stages.links("reads")
    done = await think(links, greedy_turn(user(text), system="Be brief.", n_tokens=32))
    links.close()
    assert done.ids == expected


async def test_thinker_without_instructions_matches_the_reference(stages, reference):
    expected = reference.think(reference.inputs(chat("", ("user", "hello")), []), 16)
    links = stages.links("bare")
    done = await think(links, greedy_turn(user("hello"), system="", n_tokens=16))
    links.close()
    assert done.ids == expected


async def test_thinker_matches_the_reference_on_audio(stages, reference, speech):
    clips = [speech, speech[:64_000], speech[:7_680]]
    await parity_claims.thinker_matches_the_reference_on_audio(stages, reference, clips)


async def test_turns_of_a_session_equal_one_stateless_run(stages, reference, speech):
    await parity_claims.turns_equal_one_stateless_run(stages, reference, speech)


async def test_talker_matches_the_reference_over_120_frames(stages, reference, speech):
    await parity_claims.talker_matches_the_reference(stages, reference, speech, 120)


async def test_eight_streams_that_starve_match_the_reference(stages, reference, speech):
    await parity_claims.eight_starving_streams_match(stages, reference, speech, 60)


async def test_a_talker_that_lost_a_session_receives_its_messages_again(stages, speech):
    await parity_claims.a_talker_that_lost_a_session_receives_its_messages_again(stages, speech)


async def test_a_conversation_is_built_anew_without_the_talkers_messages(stages, speech):
    """Each response was not heard to its end, which without `truncate` costs the engine session:
    what the talker has is prefilled in one request, and the new clip in another."""
    links, alone = stages.links("unheard"), stages.links("")
    history = []
    for begin in (0, 20_000, 40_000, 60_000):
        history.append(user(speech[begin:][:16_000]))
        done = await think(links, greedy_turn(*history, system="Be brief.", n_tokens=12))
        fresh = await think(alone, greedy_turn(*history, system="Be brief.", n_tokens=12))
        assert (done.ids, done.n_prompt) == (fresh.ids, fresh.n_prompt)
        assert done.rebuilt == (begin > 0) and done.n_audio == 13
        assert fresh.n_audio == 13 * (1 + begin // 20_000)
        ids = tuple(done.ids[:5])
        key = f"heard-{begin}"
        history.append(
            HistoryItem(key=key, role="assistant", parts=(TextPart("x"),), token_ids=ids)
        )
    links.close()


async def test_after_a_turn_that_was_cancelled_the_talker_has_its_message(stages, speech):
    """What a cancelled turn has sent may not have been read: its clip is computed again, with the
    states that the radix tree does not have."""
    links, alone = stages.links("cancelled"), stages.links("")
    history = []
    for begin in (0, 20_000, 40_000):
        history.append(user(speech[begin:][:16_000]))
        turn = greedy_turn(*history, system="Be brief.", n_tokens=400 if begin == 20_000 else 12)
        if begin == 20_000:
            async with links.thinker.open(turn) as thought:
                await anext(thought.tokens())
            links.thinker.segments.pop(history[-1].key)  # as if it had not been read
            continue
        done = await think(links, turn)
        fresh = await think(alone, greedy_turn(*history, system="Be brief.", n_tokens=12))
        assert (done.ids, done.n_prompt) == (fresh.ids, fresh.n_prompt)
        ids = tuple(done.ids[:5])
        key = f"heard-{begin}"
        history.append(
            HistoryItem(key=key, role="assistant", parts=(TextPart("x"),), token_ids=ids)
        )
    said = {item.key for item in history if item.role == "user"}
    assert said <= links.thinker.segments.keys()
    links.close()
