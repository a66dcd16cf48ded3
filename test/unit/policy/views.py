"""Views of rounds: written out stream by stream, or drawn."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from sglang_live.policy.config import PolicyConfig
from sglang_live.policy.decide import RoundPolicy
from sglang_live.policy.policies import Policies
from sglang_live.policy.view import Round, StageRates, StageView

NOW_S = 1000.0


def policy_of(names: Iterable[str], config: PolicyConfig | None = None) -> RoundPolicy:
    return RoundPolicy.of(Policies.parse(names), config)


SETS = {
    name: policy_of(name.split("+"))
    for name in (
        "fcfs",
        "fcfs+pacing",
        "urgency",
        "urgency+pacing",
        "deadline",
        "deadline+pacing",
    )
}
# Views are slow to draw, and every claim about them is tried on every set of policies.
few_examples = settings(max_examples=40)
BUDGETED = {name: policies for name, policies in SETS.items() if policies.order != "fcfs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One column of a view; by default a stream that plays, well ahead. for_s: since_s ago."""

    waiting: bool = False
    paused: bool = False
    for_s: float = 0.1
    age_s: float = 5.0
    buffered_s: float = 0.8
    started: bool = True
    kv_tokens: int = 500
    prefill_tokens: int = 0
    audio_s: float = 0.0
    managed: bool = True
    background: bool = False
    blocked: bool = False


def playing(buffered_s: float, **other) -> Stream:
    return Stream(buffered_s=buffered_s, **other)


def paused(buffered_s: float, **other) -> Stream:
    return Stream(buffered_s=buffered_s, paused=True, **other)


def starting(**other) -> Stream:
    return Stream(**{"buffered_s": 0.0, "started": False, **other})


def waiting(tokens: int = 100, **other) -> Stream:
    row = {"buffered_s": 0.0, "started": False, "kv_tokens": 0, "for_s": 0.01, "age_s": 0.01}
    return Stream(waiting=True, prefill_tokens=tokens, **{**row, **other})


def free_index() -> Stream:
    """An index without a stream."""
    return Stream(buffered_s=np.inf, kv_tokens=0, managed=False)


def view_of(*streams: Stream, **other) -> StageView:
    """other: fields of StageView that are not arrays. The arrays cannot be written to."""
    columns = {
        f.name: np.array([getattr(s, f.name) for s in streams], _TYPES.get(f.name, np.float64))
        for f in fields(Stream)
    }
    columns["since_s"] = NOW_S - columns.pop("for_s")
    columns["arrived_s"] = NOW_S - columns.pop("age_s")
    for column in columns.values():
        column.setflags(write=False)
    facts = {
        "now_s": NOW_S,
        "occupancy": 0.5,
        "free_tokens": 100_000,
        "prefill_running": False,
        "rates": StageRates(round_s=0.015),
        **other,
    }
    return StageView(**facts, **columns)


def permuted(view: StageView, order: np.ndarray) -> StageView:
    names = [f.name for f in fields(view) if isinstance(getattr(view, f.name), np.ndarray)]
    return replace(view, **{name: getattr(view, name)[order] for name in names})


def same(a: Round, b: Round) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(Round))


_TYPES = {
    "waiting": bool,
    "paused": bool,
    "started": bool,
    "managed": bool,
    "background": bool,
    "blocked": bool,
    "kv_tokens": np.int64,
    "prefill_tokens": np.int64,
}


def seconds(most: float) -> st.SearchStrategy[float]:
    """Any number, and often a round one, so that ties and marks occur."""
    return st.floats(0, most) | st.integers(0, int(most) * 10).map(lambda tenths: tenths / 10)


def streams() -> st.SearchStrategy[Stream]:
    common = {
        "for_s": seconds(15),
        "age_s": seconds(20),
        "buffered_s": seconds(5) | st.just(np.nan),
        "managed": st.sampled_from((True, True, True, False)),
        "blocked": st.sampled_from((False, False, False, True)),
        "started": st.booleans(),
    }
    with_kv = st.builds(Stream, kv_tokens=st.integers(1, 9000), **common)
    in_queue = st.builds(
        Stream,
        waiting=st.just(True),
        kv_tokens=st.just(0),
        prefill_tokens=st.integers(1, 3000),
        audio_s=seconds(30),
        **common,
    )
    out = st.builds(paused, seconds(5), for_s=seconds(15), kv_tokens=st.integers(1, 9000))
    return with_kv | in_queue | out | st.builds(free_index)


def rates() -> st.SearchStrategy[StageRates]:
    return st.builds(
        StageRates,
        round_s=st.floats(0.001, 0.3),
        prefill_s_per_token=st.floats(1e-6, 1e-2),
        prefill_s_fixed=st.floats(0, 0.1),
        round_s_per_stream=st.floats(0, 0.01) | st.just(np.nan),
    )


@st.composite
def views(draw, most: int = 12) -> StageView:
    return view_of(
        *draw(st.lists(streams(), max_size=most)),
        occupancy=draw(st.floats(0, 1)),
        free_tokens=draw(st.integers(0, 10_000)),
        free_rows=draw(st.integers(0, 15)),
        prefill_running=draw(st.booleans()),
        kv_wanted=draw(st.booleans()),
        rates=draw(rates()),
    )
