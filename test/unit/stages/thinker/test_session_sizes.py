"""Conversations of every size in a thinker's session, spoken in pieces, speculated and written.

After every turn the session holds what one built from the rest of the history would hold, within
its limit; a history that does not fit fails its turn alone.
"""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_live.core import HistoryItem
from sglang_live.errors import ContextLengthError
from sglang_live.kv.retention import RetentionConfig

from .test_session import LIMIT, Call, built_anew, reply, user, words_of
from .test_turn_prefill import seconds

# More by hand: N_FUZZED=20000, of turns and turn prefills.
N_FUZZED = int(os.environ.get("N_FUZZED", "400"))
N_STEPS = 8
SIZES = st.sampled_from([0, 1, 9, 60, 150, 250, 330, 345, 500])
SECONDS = st.sampled_from([0, 1, 8, 20, 24, 27, 40])
STEPS = st.one_of(
    st.tuples(st.just("write"), st.sampled_from(["user", "system", "tool", "assistant"]), SIZES),
    st.tuples(st.sampled_from(["say", "cough", "speculate"]), st.lists(SECONDS, max_size=4)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("insert"), SIZES),
    st.tuples(st.just("cut")),
    st.tuples(st.just("instructions"), SIZES),
    st.tuples(st.just("bound"), st.booleans(), st.sampled_from([None, 1, 64, 300, 10_000])),
)
seen: Counter[str] = Counter()


class Conversation:
    """Its owner's view: the history, and what is asked of the session."""

    def __init__(self):
        self.call, self.history, self.n = Call(), [user("u0", "hello")], 0
        self.bound = {"max_tokens": LIMIT, "drops_oldest": True, "instructions": ""}

    async def step(self, kind: str, *what) -> None:
        self.n += 1
        match kind:
            case "write":
                self.history.append(words_of(f"w{self.n}", *what))
            case "delete":
                del self.history[what[0] : what[0] + 1]
            case "insert":
                self.history.insert(0, words_of(f"w{self.n}", "user", *what))
            case "cut" if self.history and self.history[-1].token_ids:
                ids = self.history[-1].token_ids[:1]
                self.history[-1] = reply(f"cut{self.n}", *ids)
            case "instructions":
                self.bound["instructions"] = "word " * what[0]
            case "bound":
                self.bound["drops_oldest"], window = what
                config = window and RetentionConfig(window_tokens=window, slack_tokens=1)
                self.bound["retention"] = config
            case "say" | "cough" | "speculate":
                await self.speak(kind, [8, *what[0]])
        await self.turn()

    async def speak(self, kind: str, lengths: list[int]) -> None:
        said = [
            HistoryItem(key=f"s{self.n}/{i}", role="user", parts=seconds(s), opens=not i, closes=c)
            for i, s in enumerate(lengths)
            for c in [i == len(lengths) - 1]
        ]
        for n in range(1, len(said)):
            await self.ask(*said[:n], prefill_only=True)
        if kind == "speculate":
            await self.ask(*said, speculative=True)
        if kind == "say":
            self.history += said

    async def ask(
        self, *more: HistoryItem, prefill_only: bool = False, **changes
    ) -> set[str] | None:
        """Keys of what was left out; None: it did not fit."""
        history = [*self.history, *more]
        turn = self.call.prefill_turn if prefill_only else self.call.turn
        if not prefill_only:
            changes["key"] = f"r{self.n}"
        try:
            state = await turn(*history, **self.bound, **changes)
        except ContextLengthError:
            seen["too long"] += 1
            return None
        seen["dropped" if state.dropped else "fits"] += 1
        assert len(self.call.engine.tokens) <= LIMIT + 10
        if (
            not self.call.session.ledger.n_dropped
        ):  # of an item that a window has cut, a part is left
            left = [item for item in history if item.key not in state.dropped]
            alone = {"instructions": self.bound["instructions"]}
            if prefill_only:
                anew = Call()
                await anew.prefill_turn(*left, **alone)
                assert self.call.engine.tokens == anew.engine.tokens
            else:
                assert self.call.engine.tokens == await built_anew(*left, **alone)
        return set(state.dropped)

    async def turn(self) -> None:
        gone = await self.ask()
        if gone is None:
            return
        self.history.append(reply(f"r{self.n}", *self.call.reply[:-1]))
        gone |= set(await self.call.session.drop_old())
        self.history = [item for item in self.history if item.key not in gone]


@settings(
    max_examples=N_FUZZED // N_STEPS,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(STEPS, min_size=N_STEPS, max_size=N_STEPS))
async def test_after_any_sequence_of_sizes_a_small_turn_gets_a_response(steps):
    talk = Conversation()
    for step in steps:
        await talk.step(*step)
    if len(talk.bound["instructions"]) > 800:
        talk.bound["instructions"] = ""
    talk.bound["drops_oldest"] = True
    talk.history.append(user("last", "Hi."))
    assert await talk.ask() is not None and talk.call.reply


@pytest.fixture(scope="module", autouse=True)
def _all_ends_were_seen():
    yield
    assert set(seen) == {"fits", "dropped", "too long"}, seen
    print(dict(seen))
