"""Claims about settings: what their types refuse, and flags that are made of their fields."""

import argparse
import math
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

import pytest

from sglang_live.errors import BadInputError
from sglang_live.settings import (
    Count,
    NonNegative,
    Positive,
    Settings,
    Share,
    add_flags,
    flag,
    flags_of,
    part,
    read_flags,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room(Settings):
    max_guests: Count | None = flag(None, "at once", unset="all")
    open_s: Positive = flag(8.5, "until it closes", name="closes-after-s")
    share: Share = 0.5
    gap_s: NonNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House(Settings):
    name: str = flag(MISSING, "of the house", group="address")
    room: Room = part("rooms")
    keys: tuple[str, ...] = flag((), "to its rooms", name="key", env="KEYS", group="address")
    kind: Literal["", "brick", "wood"] = flag("", "of its walls", group="walls")
    plan: Path | None = flag(None, "drawing", env="PLAN", group="walls")
    lit: bool = flag(False, "at night", group="walls")
    owner: str = ""


def read(*argv: str, **given) -> House:
    parser = argparse.ArgumentParser()
    add_flags(parser, House)
    return read_flags(parser.parse_args(["--name", "n", *argv]), House, **given)


def test_absent_flags_leave_the_defaults_of_the_fields(monkeypatch):
    for name in ("PLAN", "KEYS"):
        monkeypatch.delenv(name, raising=False)
    assert read() == House(name="n", room=Room())


def test_flags_set_fields_and_those_of_parts():
    words = ["--max-guests", "3", "--closes-after-s", "2", "--key", "a", "--key", "b", "--lit"]
    house = read(*words, "--kind", "wood", "--plan", "a/b", owner="o")
    assert house.room == Room(max_guests=3, open_s=2.0)
    assert (house.keys, house.kind, house.plan) == (("a", "b"), "wood", Path("a/b"))
    assert (house.lit, house.owner) == (True, "o")


def test_a_variable_is_read_where_its_flag_is_absent(monkeypatch):
    monkeypatch.setenv("KEYS", " one, two,,")
    monkeypatch.setenv("PLAN", "c")
    assert (read().keys, read().plan) == (("one", "two"), Path("c"))
    assert read("--key", "a").keys == ("a",)


def test_an_empty_path_is_none():
    assert read("--plan", "").plan is None


def test_a_given_part_is_not_read_from_flags():
    assert read("--max-guests", "3", room=Room(max_guests=1)).room.max_guests == 1


@pytest.mark.parametrize("argv", [("--kind", "straw"), ("--max-guests", "x"), ("--lit", "yes")])
def test_what_no_type_reads_ends_with_usage(argv):
    with pytest.raises(SystemExit):
        read(*argv)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_guests": 0}, "max-guests must be at least 1, got 0"),
        ({"max_guests": 1.5}, "max-guests must be a whole number, got 1.5"),
        ({"max_guests": True}, "max-guests must be a whole number, got True"),
        ({"open_s": math.nan}, "closes-after-s must be positive, got nan"),
        ({"open_s": math.inf}, "closes-after-s must be positive, got inf"),
        ({"share": 1.1}, "share must be from 0 to 1, got 1.1"),
        ({"gap_s": -1}, "gap_s must be at least 0, got -1"),
        ({"gap_s": "1"}, "gap_s must be a number, got 1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_that_is_typed(wrong, message):
    with pytest.raises(BadInputError, match=f"^{message}$"):
        Room(**wrong)


def test_groups_are_those_of_the_flag_or_else_of_the_part():
    groups = [(one.name, one.group) for one in flags_of(House)]
    assert groups[:3] == [("name", "address"), ("max-guests", "rooms"), ("closes-after-s", "rooms")]


def test_help_tells_unit_default_and_variable():
    parser = argparse.ArgumentParser()
    add_flags(parser, House)
    text = " ".join(parser.format_help().split())
    assert "--max-guests N at once (default: all)" in text
    assert "--closes-after-s S until it closes (default: 8.5)" in text
    assert "--kind {brick,wood}" in text and "--plan PLAN drawing (env PLAN)" in text


def test_only_the_named_fields_become_flags():
    parser = argparse.ArgumentParser()
    add_flags(parser, House, "lit")
    assert read_flags(parser.parse_args(["--lit"]), House, name="n", room=Room()).lit
    with pytest.raises(SystemExit):
        parser.parse_args(["--kind", "wood"])
