"""Flex responses have a small share beside what is heard, and always some."""

from dataclasses import dataclass

import pytest

from sglang_live.policy.flex import FlexConfig, FlexDebt, flex_due_s

CONFIG = FlexConfig()


def test_heard_frames_earn_flex_its_share_while_it_waits():
    debt = FlexDebt()
    for _ in range(15):
        debt = debt.after(4, 0, True, CONFIG)
        assert debt.n_due(4) == 0
    debt = debt.after(4, 0, True, CONFIG)
    assert debt.n_due(4) == 1
    assert debt.after(0, 4, True, CONFIG).n_due(4) == 0


def test_without_flex_that_waits_no_debt_grows_and_large_chunks_leave_no_claim():
    debt = FlexDebt().after(1000, 0, False, CONFIG)
    assert debt == FlexDebt()
    assert debt.after(0, 48, True, CONFIG).after(64, 0, True, CONFIG).n_due(4) == 1


def test_flex_is_overdue_after_four_chunks():
    debt = FlexDebt(15.9)
    assert not debt.is_overdue(4, CONFIG)
    assert FlexDebt(16.0).is_overdue(4, CONFIG)


def test_flex_begins_late_and_goes_on_at_a_eighth_of_the_pace():
    assert flex_due_s(100.0, 0.0, CONFIG) == 110.0
    assert flex_due_s(100.0, 5.0, CONFIG) == 150.0


@dataclass
class Voice:
    """Reads pieces of a second, the one that is due first; responses always want the next one.

    late_s: of each heard piece, from the tenth of its response on.
    """

    n_heard: int
    load: float  # of the heard ones
    now_s: float = 0.0
    flex_s: float = 0.0

    def read(self, until_s: float) -> list[float]:
        spoken_s, late_s = [0.0] * self.n_heard, []
        while self.now_s < until_s:
            due = [(spoken, n) for n, spoken in enumerate(spoken_s)]
            due_s, n = min([*due, (flex_due_s(0.0, self.flex_s, CONFIG), self.n_heard)])
            self.now_s += self.load / self.n_heard
            if n == self.n_heard:
                self.flex_s += 1.0
                continue
            spoken_s[n] += 1.0
            if spoken_s[n] > 10:
                late_s.append(self.now_s - due_s)
        return late_s


@pytest.mark.parametrize("n_heard", [1, 4, 20])
def test_a_voice_with_slack_is_never_late_because_of_flex(n_heard):
    voice = Voice(n_heard, load=0.75)
    assert max(voice.read(600.0)) < 0
    assert voice.flex_s > 600.0 / 10


@pytest.mark.parametrize("n_heard", [1, 4, 20])
def test_flex_advances_where_a_voice_has_no_slack(n_heard):
    voice = Voice(n_heard, load=1.5)
    voice.read(600.0)
    assert voice.flex_s > 600.0 / 20
