"""What is kept, truncated and built anew, decided on plain data.

The naive model of an engine session is a list of tokens. Whatever happened before, it must hold
the tokens that the history alone stands for.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_live.core import AudioPart, HistoryItem
from sglang_live.stages.thinker.ledger import (
    HeldItem,
    Keep,
    LastResponse,
    Ledger,
    OpenUtterance,
    Rebuild,
    TruncateTo,
    reconcile,
)

PCM = (AudioPart(np.zeros(0, np.int16)),)


def user(key: str) -> HistoryItem:
    return HistoryItem(key=key, role="user", parts=())


def piece(key: str, *, opens: bool = False, closes: bool = False) -> HistoryItem:
    return HistoryItem(key=key, role="user", parts=PCM, opens=opens, closes=closes)


def assistant(key: str, *ids: int) -> HistoryItem:
    return HistoryItem(key=key, role="assistant", parts=(), token_ids=ids)


def decide(ledger: Ledger, *history: HistoryItem, **permissions: bool):
    return reconcile(
        ledger, history, **{"can_truncate": True, "cuts_responses": True} | permissions
    )


# A header of 10 tokens, a message of 5, markup of 2 that opens a response of 3 and its end token.
ANSWERED = Ledger(
    items=(HeldItem("u1", 15), HeldItem("a1", 21)),
    n_tokens=21,
    n_header=10,
    last_response=LastResponse(ids=(5, 6, 7), opens_at=15, begin=17),
    response_ended=True,
)


def test_a_history_that_begins_with_the_held_items_keeps_all():
    assert decide(ANSWERED, user("u1"), assistant("a1", 5, 6, 7), user("u2")) == Keep(ANSWERED)


def test_an_empty_ledger_keeps_any_history():
    assert decide(Ledger(n_tokens=10, n_header=10), user("u1")) == Keep(
        Ledger(n_tokens=10, n_header=10)
    )


def test_the_same_tokens_under_another_key_keep_all_under_that_key():
    kept = decide(ANSWERED, user("u1"), assistant("a1-edited", 5, 6, 7)).ledger
    assert kept == replace(ANSWERED, items=(HeldItem("u1", 15), HeldItem("a1-edited", 21)))


def test_the_first_tokens_of_the_last_response_are_kept():
    step = decide(ANSWERED, user("u1"), assistant("a1-heard", 5, 6), user("u2"))
    assert isinstance(step, TruncateTo) and step.ledger.n_tokens == 19
    assert step.ledger.items == (HeldItem("u1", 15), HeldItem("a1-heard", 19))
    assert step.ledger.last_response is None
    assert step.ledger.response_ended is False, "the end-of-turn token is written anew"


def test_a_response_that_is_gone_leaves_with_the_markup_that_opened_it():
    step = decide(ANSWERED, user("u1"), user("u2"))
    assert isinstance(step, TruncateTo) and step.ledger.n_tokens == 15
    assert step.ledger.keys == ["u1"] and step.ledger.response_ended is None


def test_a_change_before_the_last_response_rebuilds():
    assert decide(ANSWERED, user("u0"), assistant("a1", 5, 6, 7)) == Rebuild()


def test_without_truncation_of_responses_a_cut_response_rebuilds():
    history = user("u1"), assistant("a1-heard", 5, 6)
    assert decide(ANSWERED, *history, cuts_responses=False) == Rebuild()


# Two pieces of 4 tokens behind the markup of 1 that ends the response.
SPEAKING = replace(
    ANSWERED,
    items=(*ANSWERED.items, HeldItem("s/0", 26), HeldItem("s/1", 30)),
    n_tokens=30,
    last_response=None,
    response_ended=None,
    utterance=OpenUtterance("s/0", 21, ANSWERED.last_response, True),
)
SAID = user("u1"), assistant("a1", 5, 6, 7), piece("s/0", opens=True)


def test_a_withdrawn_utterance_leaves_what_was_held_before_it():
    step = decide(SPEAKING, *SAID[:2], user("u2"))
    assert isinstance(step, TruncateTo) and step.ledger == ANSWERED


def test_of_an_utterance_that_ended_earlier_its_first_pieces_are_kept():
    step = decide(SPEAKING, *SAID, piece("s/end", closes=True))
    assert isinstance(step, TruncateTo) and step.ledger.n_tokens == 26
    assert step.ledger.keys == ["u1", "a1", "s/0"] and step.ledger.utterance is not None


def test_a_withdrawn_utterance_without_truncation_rebuilds():
    assert decide(SPEAKING, *SAID[:2], can_truncate=False, cuts_responses=False) == Rebuild()


def test_pieces_of_one_utterance_are_dropped_together():
    over = SPEAKING.after_turn([piece("s/end", closes=True)], [34], begun_at=30, speculative=False)
    assert [item.end for item in over.items] == [15, 21, 34, 34, 34] and over.utterance is None
    left, gone = over.after_append(6).after_drop(sink_tokens=10, n_dropped=20)
    assert gone == ["u1", "a1"] and left.keys == ["s/0", "s/1", "s/end"]


def test_items_in_the_sink_stay_when_the_middle_is_dropped():
    left, gone = ANSWERED.after_append(40).after_drop(sink_tokens=15, n_dropped=20)
    assert (left.keys, gone) == (["u1"], ["a1"])
    assert left.n_resident == 41


# --- any sequence of turns, against a list of tokens ---

END = "end of turn"


@dataclass
class NaiveSession:
    """An engine session as a list of tokens, with its ledger."""

    tokens: list = field(default_factory=lambda: ["header"])
    ledger: Ledger = field(default_factory=lambda: Ledger(n_tokens=1, n_header=1))
    n_rebuilt: int = 0

    def reach(self, history: list[HistoryItem]) -> None:
        while True:
            match reconcile(self.ledger, history, can_truncate=True, cuts_responses=True):
                case Keep(ledger):
                    self.ledger = ledger
                    return
                case TruncateTo(ledger):
                    assert 0 < ledger.n_tokens < len(self.tokens), "each step drops something"
                    del self.tokens[ledger.n_tokens :]
                    self.ledger = ledger
                case Rebuild():
                    self.tokens, self.ledger = ["header"], Ledger(n_tokens=1, n_header=1)
                    self.n_rebuilt += 1

    def turn(self, history, *, response=None, speculative=False) -> None:
        """response: key, tokens and whether the model ends it; None: it is not asked for."""
        self.reach(history)
        assert self.ledger.begins(history)
        start, new = self.ledger, history[len(self.ledger.items) :]
        if start.response_ended is not None:
            self.tokens += _closing(start.response_ended)
        ends = []
        for item in new:
            self.tokens += _tokens_of(item)
            ends.append(len(self.tokens))
        if response is not None:
            self.tokens.append("open")
        self._note_growth()
        if new or response is not None:
            self.ledger = self.ledger.after_turn(
                new, ends, begun_at=start.n_tokens, speculative=speculative
            )
        if response is not None:
            key, ids, ended = response
            written = [*ids, END] if ended else list(ids)
            self.tokens += written
            self._note_growth()
            self.ledger = self.ledger.with_response(
                key, written, model_wrote_end=ended, opening_tokens=1
            )

    def _note_growth(self) -> None:
        self.ledger = self.ledger.after_append(len(self.tokens) - self.ledger.n_tokens)


def _closing(ended: bool) -> list:
    return ["\n"] if ended else [END, "\n"]


def _tokens_of(item: HistoryItem) -> list:
    """Of a message in a prompt: an assistant item reads as the model wrote it."""
    if item.role == "assistant":
        return ["open", *item.token_ids, END, "\n"]
    return [f"{item.key}.{n}" for n in range(1 + len(item.key) % 3)]


def naive(history: list[HistoryItem]) -> list:
    return ["header", *(token for item in history for token in _tokens_of(item))]


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "say", "cough", "speculate", "cut", "forget", "edit", "delete"]),
        st.integers(0, 3),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=300, deadline=None)
@given(steps=steps)
def test_after_any_sequence_of_turns_the_session_holds_what_its_history_stands_for(steps):
    session, history = NaiveSession(), [user("u")]
    for n, (what, size, ended) in enumerate(steps):
        utterance = [piece(f"s{n}/{i}", opens=i == 0) for i in range(size)]
        for i in range(size if what in ("say", "cough", "speculate") else 0):
            session.turn([*history, *utterance[: i + 1]])
        whole = [*utterance, piece(f"s{n}/end", opens=not utterance, closes=True)]
        match what:
            case "write" | "cough":
                history.append(user(f"w{n}"))
            case "say":
                history += whole
            case "speculate":
                response = (f"spec{n}", (1, 2), ended)
                session.turn([*history, *whole], response=response, speculative=True)
                if ended:
                    history += [*whole, assistant(f"spec{n}", 1, 2), user(f"w{n}")]
                else:
                    history += [*utterance[:1], piece(f"s{n}/late", opens=size == 0, closes=True)]
            case "cut" if history[-1].role == "assistant":
                history[-1] = assistant(f"cut{n}", *history[-1].token_ids[:size])
            case "forget" if history[-1].role == "assistant":
                history.pop()
            case "edit":
                history[0] = user(f"edited{n}")
            case "delete" if len(history) > 1:
                del history[0]
        ids = tuple(range(10 * n, 10 * n + size))
        session.turn(history, response=(f"a{n}", ids, ended))
        written = [*ids, END] if ended else [*ids]
        assert session.tokens == [*naive(history), "open", *written]
        history.append(assistant(f"a{n}", *ids))


@given(n_turns=st.integers(1, 6), size=st.integers(1, 5))
def test_a_history_that_only_grows_is_never_rebuilt(n_turns, size):
    session, history = NaiveSession(), []
    for n in range(n_turns):
        history.append(user(f"u{n}"))
        session.turn(history, response=(f"a{n}", tuple(range(size)), True))
        history.append(assistant(f"a{n}", *range(size)))
    assert session.n_rebuilt == 0 and len(session.ledger.items) == 2 * n_turns
