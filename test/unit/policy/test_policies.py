"""Which names of policies make sense together."""

from dataclasses import fields

import msgspec
import pytest

from sglang_live.errors import BadInputError
from sglang_live.policy.policies import NAMES, POLICIES, Policies


def test_a_name_turns_on_one_policy():
    assert Policies.parse(("urgency", "next-use")) == Policies(order="urgency", next_use=True)
    assert Policies.parse(()) == Policies()


def test_all_are_all_booleans_but_that_of_a_paper_and_the_order_of_urgency():
    everything = Policies.from_flag("all")
    assert everything.order == "urgency"
    off = [f.name for f in fields(Policies) if getattr(everything, f.name) is False]
    assert off == ["bros"]
    assert Policies.from_flag("off") == Policies()


@pytest.mark.parametrize(
    "names", [(), POLICIES, ("fcfs",), ("deadline", "turn-prefill", "truncate")]
)
def test_names_survive_the_way_there_and_back(names):
    policies = Policies.parse(names)
    assert Policies.parse(policies.names) == policies
    assert set(policies.names) == set(names)
    assert msgspec.json.decode(msgspec.json.encode(policies), type=Policies) == policies


@pytest.mark.parametrize("name", sorted({*NAMES} - {"preload", "turn-prefill"}))
def test_policies_are_false_if_none_is_on(name):
    assert Policies.parse((name,))
    assert not Policies()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("speed", "pacing"),
            r"unknown policies \['speed'\]; there are: \['admission', 'arbiter', 'bros'",
        ),
        (("urgency", "deadline"), r"\['urgency', 'deadline'\] exclude each other"),
        (("fcfs", "urgency"), r"\['fcfs', 'urgency'\] exclude each other"),
        (("preload",), "preload needs next-use"),
        (("turn-prefill",), "turn-prefill needs truncate"),
    ],
)
def test_invalid_names_are_refused(names, said):
    with pytest.raises(BadInputError, match=said):
        Policies.parse(names)
