"""Which prefills wait for their KV, and for how long."""

import math
from types import SimpleNamespace

import pytest

from sglang_live.bridge.round_facts import LinkRate
from sglang_live.bridge.scheduler.awaited_kv import AwaitedKv
from sglang_live.policy.view import StageRates

N_TOKENS = 1000
RUNNING = [SimpleNamespace(rid="runs")]
# A prompt's prefill takes 0.02 s, in two layers.
RATES = StageRates(round_s=0.02, prefill_s_fixed=0.01, prefill_s_per_token=1e-3)


class FakeTier:
    """A tier whose link moves `tokens_per_s`; transfers end when a test says so."""

    n_layers = 2
    copies = SimpleNamespace(bytes_per_token=8)

    def __init__(self, tokens_per_s: float | None):
        self.on_host = {"a": N_TOKENS, "b": N_TOKENS}
        self.loading: set[str] = set()
        self.has_room, self.loads = True, self
        known = None if tokens_per_s is None else 8 * tokens_per_s
        self.all = SimpleNamespace(
            rates=(LinkRate(known, 0.0), LinkRate(None, 0.0)),
            is_loading=self.loading.__contains__,
            bytes_in_transfer=lambda nearer: 8 * N_TOKENS * len(self.loading),
        )

    def tokens_to_preload(self, session_id: str) -> int:
        return self.on_host.get(session_id, 0)

    def is_nearer(self, session_id: str) -> bool:
        return False

    def load_now(self, session_id: str, n_tokens: int) -> int:
        if not self.has_room:
            return 0
        self.loading.add(session_id)
        self.on_host[session_id] -= n_tokens
        return n_tokens


class World:
    def __init__(self, tokens_per_s: float | None = 10_000.0):
        self.tier = FakeTier(tokens_per_s)
        self.protected: dict[str, float] = {}
        idle = SimpleNamespace(protect=self.protected.__setitem__)
        sessions = SimpleNamespace(
            tier=self.tier, idle=idle, resized=lambda session_id: self.resized.append(session_id)
        )
        self.resized: list[str] = []
        self.fits = True
        self.slack_s = 0.0
        self.rounds = SimpleNamespace(rates=RATES, now_s=100.0, slack_of=lambda rids: self.slack_s)
        scheduler = SimpleNamespace(
            page_size=16,
            tree_cache=SimpleNamespace(session=sessions),
            memory=SimpleNamespace(
                fits=lambda req, running, free: self.fits,
                state=lambda: SimpleNamespace(free=0),
                tokens_to_prefill=lambda req: 10,
            ),
        )
        self.prefills = AwaitedKv(scheduler, self.rounds)

    @property
    def awaits_any(self) -> bool:
        return self.prefills.idle_limit_s() < math.inf

    def ready(self, *reqs, running=RUNNING) -> tuple[list[str], list[str]]:
        found = self.prefills.ready(list(reqs), running)
        ready, loading = ([req.rid for req in some] for some in found)
        return ready, loading


def req(session: str | None, rid: str = ""):
    return SimpleNamespace(
        rid=rid or f"of-{session}",
        session=None if session is None else SimpleNamespace(session_id=session),
        origin_input_ids=[0] * 2000,
        multimodal_inputs=None,
    )


def test_a_prefill_waits_for_a_slow_load_while_others_decode():
    world = World()
    other = req(None)
    assert world.ready(req("a"), other) == ([other.rid], ["of-a"])
    assert world.protected["a"] > world.rounds.now_s and world.resized == ["a"]
    assert world.awaits_any
    world.rounds.now_s += 0.1
    assert world.ready(req("a")) == ([], ["of-a"])
    world.tier.loading.clear()
    assert world.ready(req("a")) == (["of-a"], [])
    assert not world.awaits_any
    counts = world.prefills.totals()
    assert counts == {
        "prefills_awaited_kv": 1,
        "prefills_awaited_kv_s": pytest.approx(0.1),
    }


def test_the_prefill_hides_the_rest_of_the_load():
    world = World()
    world.ready(req("a"))
    # In its 0.02 s the link moves 200 tokens; loads are of whole pages.
    assert world.tier.on_host["a"] == N_TOKENS - 800


def test_a_begun_load_is_waited_for_although_nothing_decodes_any_more():
    world = World()
    world.ready(req("a"))
    assert world.ready(req("a"), running=[]) == ([], ["of-a"])


CASES = ["nothing decodes", "fast link", "unmeasured", "buffers last", "full", "no row"]


@pytest.mark.parametrize("case", CASES)
def test_otherwise_the_prefill_loads_layer_by_layer(case):
    world = World({"fast link": 60_000.0, "unmeasured": None}.get(case, 10_000.0))
    world.fits, world.tier.has_room = case != "full", case != "no row"
    world.slack_s = 0.1 if case == "buffers last" else 0.0
    running = [] if case == "nothing decodes" else RUNNING
    assert world.ready(req("a"), running=running) == (["of-a"], [])
    assert not world.tier.loading and not world.awaits_any


def test_kv_that_is_evicted_again_is_not_waited_for_twice():
    world = World()
    world.ready(req("a"))
    world.tier.loading.clear()
    world.ready(req("a"))
    world.tier.on_host["a"] = N_TOKENS
    assert world.ready(req("a")) == (["of-a"], [])
    # The session's next request is another one.
    assert world.ready(req("a", "next")) == ([], ["next"])


def test_a_request_that_has_left_the_queue_is_forgotten():
    world = World()
    world.ready(req("a"))
    world.ready(req(None))
    assert not world.awaits_any


def test_a_load_behind_another_one_takes_longer():
    world = World(60_000.0)
    world.tier.loading.update(("x", "y"))
    assert world.ready(req("a")) == ([], ["of-a"])
