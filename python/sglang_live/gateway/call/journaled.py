"""A call in the journal: what is written of it while it goes on.

In: changes of a call, as its outbox and its reader notice them. Out: records (journal/journal.py),
of which another gateway makes the call (saved_call.py).
Owner: one JournaledCall per call that can be resumed. A snapshot of what has changed is taken soon
after a change, never while a client event is handled: a record has the effects of the first
`n_settled` events and of no others, so that the client can send the rest again. What can be made
anew waits for the journal's tick.
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
    Head,
    Latest,
    Placed,
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
# Newest items, which may change without an event that tells of them alone.
_N_NEW = 8
_AUDIO = "response.output_audio.delta"
_PROGRESS = ".delta"
# These change nothing that the client does not send again, or that a record has.
_LATER = (
    "error",
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
)
# These may change any item.
_TRUNCATED = "conversation.item.truncated"
_TRANSCRIBED = "conversation.item.input_audio_transcription."
# What has come before belongs to no turn that is still open.
_ENDS_OF_AUDIO = ("input_audio_buffer.committed", "input_audio_buffer.cleared")
_encode = msgspec.msgpack.encode


@dataclass(slots=True)
class _Shown:
    """What the records have of an item.

    growing: what the running response's record has of it; None: it has a record of its own.
    """

    state: tuple[Any, ...]
    n_media: int
    growing: Placed | None = None


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
        self._kept = journal.begin(
            session.session_id, session.epoch, on_taken, self._take, is_first=is_first
        )
        self._earlier = saved.prefixes[-3:] if saved else ()
        self._written: dict[str, bytes] = {}
        self._config: SessionConfig | None = None
        self._shown: dict[str, _Shown] = {}
        # In order, at the latest snapshot. What may have changed since beside the one that grows:
        # is_some: new ones. is_any: all.
        self._items: tuple[Item, ...] = ()
        self._is_some = self._is_any = False
        self._heads: tuple[Any, ...] = ()
        if saved is not None:
            self._items = call.conversation.items
            for n, item in enumerate(self._items):
                state = (self._items[n - 1].id if n else None, *state_of(item))
                is_written = item_record(item.id) in saved.kept.records
                self._shown[item.id] = _Shown(state if is_written else (), len(media_of(item)))
        self._n_read = self._n_settled = saved.n_settled if saved else 0
        self._heard_at: tuple[float, int] = (self._now_s, self._n_read)
        self._is_reading = self._is_due = self._settles = False
        self._response: ActiveResponse | None = None
        self._latest: Latest | None = None
        # Numbers of the events with the first audio of the newest responses.
        self._audio_at: dict[str, int] = {}
        if saved is not None and saved.latest is not None and saved.knows_sound:
            self._audio_at[saved.latest.response_id] = -1
        self._soon: asyncio.TimerHandle | None = None
        outbox.on_emit = self._on_emit
        self._take_soon()

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
        self._is_any = True
        self._take()
        self._kept.put({})  # another gateway may have it by now
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
        if self._soon is not None:
            self._soon.cancel()
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
            self._take_soon()
        elif kind.endswith(_PROGRESS) or kind in _LATER:
            self._kept.put_later()
        elif kind.startswith(_TRANSCRIBED):
            self._is_any = True
            self._kept.put_later()
        else:
            self._is_any |= kind == _TRUNCATED
            if kind in _ENDS_OF_AUDIO:
                self._settles = self._is_reading
                if not self._is_reading:
                    self._settle(self._n_read)
            self._take_soon()

    def _take_soon(self) -> None:
        self._is_some = True
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_SOON_S, self._take)

    def _take(self) -> None:
        """Write what has changed."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._is_due = self._is_reading
        if self._is_due or not self._kept.is_kept:
            return
        at_s, n = self._heard_at
        if self._now_s - at_s >= _ONSET_S and not self._call.turns.holds_audio:
            self._n_settled = max(n, self._n_settled)
            self._heard_at = (self._now_s, self._n_read)
        try:
            if records := self._changed():
                self._kept.put(records)
        except Exception:
            # A bug ends what the journal has of the call, not the call.
            log.exception("snapshot_crashed session=%s", self._session.session_id)
            self._kept.fail()

    def _changed(self) -> dict[str, Record]:
        response = self._call.responses.latest
        written = response.writer.item if response else None
        is_growing = written is not None and written.status == "in_progress"
        growing = written.id if written and is_growing else None
        records = self._changed_items(growing)
        config = self._current()
        if config is not self._config:
            self._config = config
            records |= self._if_new(CONFIG, _encode(config))
        if response is not None:
            shown = self._shown.get(growing) if growing else None
            latest = self._latest_of(response, shown.growing if shown else None)
            records |= self._if_new(LATEST, _encode(latest))
        responses, session = self._call.responses, self._session
        heads = (self._n_settled, session.n_turns, responses.has_spoken, session.addresses)
        if heads != self._heads:
            self._heads = heads
            records[HEAD] = _encode(self._head())
        return records

    def _changed_items(self, growing: str | None) -> dict[str, Record]:
        """growing: id of the item that the latest response's record has."""
        records: dict[str, Record] = {}
        items, before = self._call.conversation.items, self._items
        first = 0
        grows_last = growing is not None and bool(items) and items[-1].id == growing
        is_any = self._is_any or (growing is not None and not grows_last)
        if items[: len(before)] == before and not is_any:
            n_new = 1 if grows_last and not self._is_some else _N_NEW
            first = max(0, min(len(before), len(items) - n_new))
        self._items, self._is_some, self._is_any = items, False, False
        last = items[first - 1].id if first else None
        for item in items[first:]:
            self._add_changed(records, item, last, item.id == growing)
            last = item.id
        if len(self._shown) > len(items):
            for item_id in self._shown.keys() - {item.id for item in items}:
                shown = self._shown.pop(item_id)
                records[item_record(item_id)] = None
                records |= {sound_record_of(item_id, n): None for n in range(shown.n_media)}
        return records

    def _add_changed(
        self, records: dict[str, Record], item: Item, before: str | None, is_growing: bool
    ) -> None:
        state, shown = (before, *state_of(item)), self._shown.get(item.id)
        if shown and shown.state == state and (is_growing or not shown.growing):
            return
        media = media_of(item)
        if shown is None:
            for n, medium in enumerate(media):
                made = Lazy(partial(medium_record, medium), medium.size_bytes)
                records[sound_record_of(item.id, n)] = made
        written = msgspec.Raw(record_of(item))
        placed = Placed(before, self._session.epoch, self._outbox.n_events, written)
        self._shown[item.id] = _Shown(state, len(media), placed if is_growing else None)
        if not is_growing:
            records[item_record(item.id)] = _encode(placed)

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
            self._earlier,
            session.n_turns,
            self._call.responses.has_spoken,
            session.addresses,
        )

    def _latest_of(self, response: ActiveResponse, growing: Placed | None) -> Latest:
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
            growing,
        )
        return self._latest
