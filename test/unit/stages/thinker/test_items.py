"""What the stage holds of the audio of a long conversation."""

import asyncio

import numpy as np
import pytest

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.stages.thinker.items import Packing

pytestmark = pytest.mark.usefixtures("must_not_hang")

SPEECH = (3000 * np.sin(np.arange(48_000) / 20)).astype(np.int16)


def heard(n: int, seconds: int = 3) -> HistoryItem:
    parts = (AudioPart(SPEECH[: 16_000 * seconds]), TextPart("words"))
    return HistoryItem(key=f"u{n}", role="user", parts=parts)


def raw_s(items: dict[str, HistoryItem]) -> float:
    return sum(item.raw_s for item in items.values())


async def test_more_than_ten_seconds_are_packed_but_the_newest_item_is_not():
    items = {"s": {f"u{n}": heard(n) for n in range(3)}}
    packing = Packing(items)
    packing.begin("s")
    assert not packing._tasks
    items["s"]["u3"] = heard(3)
    packing.begin("s")
    packing.begin("s")
    await asyncio.gather(*packing._tasks.values())
    assert raw_s(items["s"]) == 3.0 and not packing._tasks
    assert not items["s"]["u3"].is_packed
    assert items["s"]["u0"].parts[1] == TextPart("words")
    assert items["s"]["u0"].parts[0].n_samples == 48_000


async def test_what_a_session_holds_by_then_is_packed():
    items = {"s": {f"u{n}": heard(n) for n in range(6)}, "gone": {"u": heard(0), "v": heard(1, 3)}}
    items["gone"] |= {f"w{n}": heard(n) for n in range(4)}
    packing = Packing(items)
    packing.begin("s")
    packing.begin("gone")
    items["s"] = {key: items["s"][key] for key in ("u2", "u3", "u4", "u5")}  # a turn has begun
    del items["gone"]
    await asyncio.gather(*packing._tasks.values())
    assert list(items) == ["s"] and list(items["s"]) == ["u2", "u3", "u4", "u5"]
    assert raw_s(items["s"]) == 3.0
