"""A client without a resume token: a new session gets the history in writing."""

import pytest

from sglang_live.core import HistoryItem, TextPart
from test.engine.turns import greedy_turn, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

RULES = "You are a guide. Say where each thing is, in one short sentence, and ask what is next."


def said(role: str, text: str, n: int) -> HistoryItem:
    return HistoryItem(key=f"{role}-brought-{n}", role=role, parts=(TextPart(text),))


async def test_a_session_that_brings_its_history_finds_its_kv_by_prefix(stages):
    before = [user("tell me about the old town"), said("assistant", "It has three gates.", 0)]
    asked = [*before, user("and the harbour")]
    first = stages.links("before-the-loss")
    once = await think(first, greedy_turn(*asked, system=RULES, n_tokens=6))
    first.close()
    # The same words under other keys, and one turn more.
    again = [said(item.role, item.parts[0].text, n) for n, item in enumerate(asked, start=1)]
    again += [said("assistant", "It is behind the hill.", 9), user("how far is that")]
    second = stages.links("after-the-loss")
    then = await think(second, greedy_turn(*again, system=RULES, n_tokens=6))
    second.close()
    print(once.n_prompt, once.n_cached, then.n_prompt, then.n_cached)
    assert once.n_cached < 8
    assert once.n_prompt - 2 <= then.n_cached < then.n_prompt
