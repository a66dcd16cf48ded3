"""A call in the journal: what is written of it while it goes on.

In: changes of a call, as its outbox and its reader notice them. Out: records (journal/journal.py),
of which another gateway makes the call (saved_call.py).
Owner: one JournaledCall per call that can be resumed. A snapshot of what has changed is taken soon
after a change, never while a client event is handled: a record has the effects of the first
`n_settled` events and of no others, so that the client can send the rest again.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from sglang_live.gateway.call.call import Call
from sglang_live.gateway.call.conversation.item_records import (
    media_of,
    medium_record,
    record_of,
    state_of,
)
from sglang_live.gateway.call.conversation.items import Item
from sglang_live.gateway.call.outbox import Outbox
from sglang_live.gateway.call.responses.writer import ActiveResponse
from sglang_live.gateway.call.saved_call import (
    CONFIG,
    FORM,
    HEAD,
    LATEST,
    ORDER,
    Head,
    Latest,
    SavedCall,
    item_record,
    sound_record_of,
)
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.journal.journal import Journal, Lazy, Record
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# What the event loop has to do first. A client that has got an event, and a gateway that is killed
# before it is written, differ.
_SOON_S = 0.0
# Of the running response: what comes after it is made anew.
_PROGRESS_S = 0.5
# By then an owner whose call has gone on elsewhere learns of it.
_STILL_HERE_S = 3.0
# For the store, while a client waits that comes back.
_ASKED_S = 1.0
# For the store, at the end of a call that another gateway is to have. As for its every answer.
_HANDED_OVER_S = 2.0
# A voice is found within this time, and with it the audio that belongs to its turn.
_ONSET_S = 2.0
# Responses out of band may have audio beside the latest one.
_MOST_AUDIBLE = 8
# Points of a running response at which its text is known.
_MOST_MARKS = 64
_AUDIO = "response.output_audio.delta"
# What has come before belongs to no turn that is still open.
_ENDS_OF_AUDIO = ("input_audio_buffer.committed", "input_audio_buffer.cleared")
_encode = msgspec.msgpack.encode


@dataclass(slots=True)
class _Shown:
    """What the records have of an item. at: see Latest.created_at."""

    state: tuple[Any, ...]
    at: int
    n_media: int


class JournaledCall:
    def __init__(
        self,
        journal: Journal,
        session: VoiceSession,
        call: Call,
        outbox: Outbox,
        *,
        owner: str,
        kind: str,
        config: Callable[[], SessionConfig],
        on_taken: Callable[[], None],
        saved: SavedCall | None = None,
    ):
        """
        Args:
            kind: type of the session. config: its settings now.
            on_taken: called when the call has gone on at another gateway, and has to end here.
            saved: of the gateway that had the call before; None: it begins.
        """
        self._session = session
        self._call = call
        self._outbox = outbox
        self._kind = kind
        self._current = config
        self._owner = journal.key.digest("owner", owner)
        is_first = saved is None
        self._kept = journal.begin(session.session_id, session.epoch, on_taken, is_first=is_first)
        self._earlier = saved.prefixes[-3:] if saved else ()
        self._written: dict[str, bytes] = {}
        self._config: SessionConfig | None = None
        self._items: dict[str, _Shown] = {}
        if saved is not None:
            for item in call.conversation.items:
                self._items[item.id] = _Shown(state_of(item), 0, len(media_of(item)))
        self._n_read = self._n_settled = saved.n_settled if saved else 0
        self._heard_at: tuple[float, int] = (self._now_s, self._n_read)
        self._is_reading = self._is_due = self._settles = False
        self._response: ActiveResponse | None = None
        self._latest: Latest | None = None
        # Numbers of the events with the first audio of the newest responses.
        self._audio_at: dict[str, int] = {}
        if saved is not None and saved.latest is not None and saved.knows_sound:
            self._audio_at[saved.latest.response_id] = -1
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = float("inf")
        outbox.on_emit = self._on_emit
        self._take_within(_SOON_S)

    def resumable_by(self, token: str) -> None:
        self._kept.put({}, token)

    async def is_here(self) -> bool:
        """Whether it has not gone on at another gateway; without the store, as far as is known."""
        self._kept.put({})
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASKED_S):
                await self._kept.settled()
        return not self._kept.is_taken

    async def hand_over(self) -> bool:
        """Let go of the call, for another gateway; between two client events.

        Returns:
            Whether the journal has all of it; if not, the call is still here. Nothing more is
            emitted then: an event that comes behind the last record would be told of twice.
        """
        self._take()
        if not self._kept.is_kept:
            return False
        self._outbox.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_HANDED_OVER_S):
                await self._kept.settled()
        return self._kept.let_go()

    def reading(self) -> None:
        """A client event is handled, until read()."""
        self._is_reading = True

    def read(self, n_read: int, *, comes_again: bool) -> None:
        """
        Args:
            n_read: client events that were handled so far.
            comes_again: whether the latest had no effect yet but on a turn that is not over: the
                client may send it again.
        """
        self._is_reading, self._n_read = False, n_read
        if self._settles or not comes_again:
            self._settle(n_read)
        if self._is_due:
            self._take()

    def close(self) -> None:
        """The call is over, or cannot be resumed any more."""
        self._outbox.on_emit = None
        if self._timer is not None:
            self._timer.cancel()
        self._kept.close()

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _settle(self, n: int) -> None:
        self._settles = False
        self._n_settled = max(n, self._n_settled)
        self._heard_at = (self._now_s, n)

    def _on_emit(self, kind: str, lane: str | None) -> None:
        if kind == _AUDIO and lane is not None and lane not in self._audio_at:
            newest = list(self._audio_at.items())[1 - _MOST_AUDIBLE :]
            self._audio_at = {**dict(newest), lane: self._outbox.n_events - 1}
            self._take_within(_SOON_S)
        if kind in _ENDS_OF_AUDIO:
            self._settles = self._is_reading
            if not self._is_reading:
                self._settle(self._n_read)
        self._take_within(_PROGRESS_S if kind.endswith(".delta") else _SOON_S)

    def _take_within(self, delay_s: float) -> None:
        due_s = self._now_s + delay_s
        if due_s >= self._due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._take)

    def _take(self) -> None:
        """Write what has changed."""
        self._due_s = float("inf")
        self._is_due = self._is_reading
        if self._is_due or not self._kept.is_kept:
            return
        at_s, n = self._heard_at
        if self._now_s - at_s >= _ONSET_S and not self._call.turns.holds_audio:
            self._n_settled = max(n, self._n_settled)
            self._heard_at = (self._now_s, self._n_read)
        try:
            self._kept.put(self._changed())
        except Exception:
            # A bug ends what the journal has of the call, not the call.
            log.exception("snapshot_crashed session=%s", self._session.session_id)
            self._kept.fail()
            return
        self._take_within(_STILL_HERE_S)

    def _changed(self) -> dict[str, Record]:
        records: dict[str, Record] = {}
        items = self._call.conversation.items
        for item in items:
            records |= self._changed_item(item)
        gone = self._items.keys() - {item.id for item in items}
        for item_id in gone:
            shown = self._items.pop(item_id)
            records[item_record(item_id)] = None
            records |= {sound_record_of(item_id, n): None for n in range(shown.n_media)}
        config = self._current()
        if config is not self._config:
            self._config = config
            records |= self._if_new(CONFIG, _encode(config))
        if response := self._call.responses.latest:
            records |= self._if_new(LATEST, _encode(self._latest_of(response)))
        order = tuple((item.id, self._items[item.id].at) for item in items)
        records |= self._if_new(ORDER, _encode(order))
        return records | self._if_new(HEAD, _encode(self._head()))

    def _changed_item(self, item: Item) -> dict[str, Record]:
        state, shown = state_of(item), self._items.get(item.id)
        if shown is not None and shown.state == state:
            return {}
        records: dict[str, Record] = {item_record(item.id): record_of(item)}
        media = media_of(item)
        if shown is None:
            for n, medium in enumerate(media):
                made = Lazy(partial(medium_record, medium), medium.size_bytes)
                records[sound_record_of(item.id, n)] = made
        at = self._outbox.n_events
        self._items[item.id] = _Shown(state, at, len(media))
        return records

    def _if_new(self, name: str, data: bytes) -> dict[str, Record]:
        if self._written.get(name) == data:
            return {}
        self._written[name] = data
        return {name: data}

    def _head(self) -> Head:
        outbox, session = self._outbox, self._session
        return Head(
            FORM,
            self._kind,
            self._call.conversation.id,
            self._owner,
            self._n_settled,
            outbox.event_prefix,
            outbox.n_events,
            self._earlier,
            session.n_turns,
            self._call.responses.has_spoken,
            session.addresses,
        )

    def _latest_of(self, response: ActiveResponse) -> Latest:
        writer, plan, at = response.writer, response.plan, self._outbox.n_events
        before = self._latest if response is self._response else None
        self._response = response
        opened_at = before.opened_at if before else None
        done_at, begun = (before.done_at, before.begun) if before else (None, plan.begun)
        text = writer.item.text if writer.item else ""
        if done_at is None and not plan.stateless and (response.turn_running or writer.done):
            latest = self._session.begun()
            # Behind the end of a response the session's latest turn may be the next one.
            if latest is not None and latest.said.startswith(text):
                begun = latest
        marks = before.marks if before else ()
        if not marks or marks[-1][1] != len(text):
            marks = (*marks[1 - _MOST_MARKS :], (at, len(text)))
        self._latest = Latest(
            response.id,
            None if plan.config is self._config else plan.config,
            plan.instructed,
            plan.metadata,
            writer.item.id if writer.item else None,
            tuple(one.id for one in writer.output[bool(writer.item) :]),
            writer.after_id,
            writer.status,
            writer.reason,
            before.created_at if before else at,
            (opened_at or at) if writer.item else None,
            self._audio_at.get(response.id),
            (done_at or at) if writer.done else None,
            marks,
            round(response.playback.clock.heard_s(self._call.now_s), 3),
            begun,
            plan.context is not None,
        )
        return self._latest
