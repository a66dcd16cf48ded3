"""A call of another gateway, as the journal has it.

In: a token. Out: settings, items and the latest response, for a session that goes on here.
"""

import logging
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from sglang_live.core import BegunTurn
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.conversation.item_records import items_of
from sglang_live.gateway.call.conversation.items import FunctionCallItem, Item
from sglang_live.gateway.call.outbox import number_of
from sglang_live.gateway.call.responses.plan import ResponsePlan
from sglang_live.gateway.call.responses.responses import Unfinished
from sglang_live.gateway.call.resumption import ResumeTokenError, session_of
from sglang_live.gateway.call.sent_log import not_kept
from sglang_live.gateway.call.settings import SessionConfig
from sglang_live.journal.journal import Journal
from sglang_live.journal.records import UnreadableRecordError
from sglang_live.journal.store import Kept

log = logging.getLogger(__name__)

# Names of records. Beside them there is one for each item, and for each of its sounds.
HEAD, CONFIG, LATEST = "head", "config", "latest"
_ITEM = "i:"
# Of these records: gateways of another form do not go on with a call.
FORM = 2


class Head(msgspec.Struct, frozen=True, array_like=True):
    """
    kind: type of the session. conversation: its id.
    owner: digest of the key's owner.
    n_settled: client events whose effects the records have.
    prefix: of the outbox. earlier: of the outboxes before it.
    addresses: of the session's replicas.
    """

    form: int
    kind: str
    conversation: str
    owner: str
    n_settled: int
    prefix: str
    earlier: tuple[str, ...]
    n_turns: int
    has_spoken: bool
    addresses: dict[str, str]


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """An item with its place: a long conversation has no record that grows.

    before: id of the item before it; None: it is the first.
    at: number of an event of this epoch behind those that told of it.
    item: as item_records.py writes it.
    """

    before: str | None
    epoch: int
    at: int
    item: msgspec.Raw


class Latest(msgspec.Struct, frozen=True, array_like=True):
    """The latest response in the conversation.

    config: its settings; None: the session's.
    item: id of its item. calls: ids of its function calls.
    after: id of the item behind which it is; None: it is the first.
    created_at, opened_at, done_at: number of an event behind those that told of it; None: no event
        has. audio_at: of the one with its first audio.
    marks: (number of an event, characters of text that came before it).
    begun: None: nothing has come of it. has_context: of its own, which the journal has not.
    growing: its item, while that has no record of its own.
    """

    response_id: str
    config: SessionConfig | None
    instructed: bool
    metadata: dict[str, str] | None
    item: str | None
    calls: tuple[str, ...]
    after: str | None
    status: str
    reason: str | None
    created_at: int
    opened_at: int | None
    audio_at: int | None
    done_at: int | None
    marks: tuple[tuple[int, int], ...]
    heard_s: float
    begun: BegunTurn | None
    has_context: bool
    growing: Placed | None


def item_record(item_id: str) -> str:
    """Name of an item's record."""
    return _ITEM + item_id


def sound_record_of(item_id: str, n: int) -> str:
    """Name of the record of its n-th sound."""
    return f"s:{item_id}:{n}"


@dataclass(frozen=True)
class SavedCall:
    """A call of another gateway, for a client that comes here.

    after: number of the last event of that gateway that its client has got; None: all of them.
    heard_s: what the client has heard of the newest item whose audio it has got; None: what was
        known of it. heard_item: id of that item; None: as its events tell.
    """

    journal: Journal = field(repr=False)
    kept: Kept = field(repr=False)
    head: Head
    config: SessionConfig
    after: int | None
    heard_s: float | None
    heard_item: str | None

    @property
    def session_id(self) -> str:
        return self.kept.session_id

    @property
    def epoch(self) -> int:
        """In which it goes on."""
        return self.kept.epoch + 1

    @property
    def addresses(self) -> dict[str, str]:
        """Of its replicas, by stage."""
        return self.head.addresses

    @property
    def n_settled(self) -> int:
        return self.head.n_settled

    @property
    def prefixes(self) -> tuple[str, ...]:
        return (*self.head.earlier, self.head.prefix)

    async def take(self) -> None:
        """Make it this gateway's. Raises ResumeTokenError, StoreError."""
        if not await self.journal.take(self.kept):
            raise ResumeTokenError

    @cached_property
    def _placed(self) -> list[tuple[str, Placed]]:
        """Ids and records of its items, in order."""
        placed = {
            name.removeprefix(_ITEM): msgspec.msgpack.decode(data, type=Placed)
            for name, data in self.kept.records.items()
            if name.startswith(_ITEM)
        }
        if self.latest and self.latest.item and self.latest.growing:
            placed[self.latest.item] = self.latest.growing
        behind = {one.before: (item_id, one) for item_id, one in placed.items()}
        order: list[tuple[str, Placed]] = []
        while (after := behind.pop(order[-1][0] if order else None, None)) is not None:
            order.append(after)
        if len(order) != len(placed):
            raise UnreadableRecordError(f"{len(placed) - len(order)} items have no place")
        return order

    @cached_property
    def items(self) -> list[Item]:
        records = self.kept.records
        data = [placed.item for _, placed in self._placed]
        return items_of(data, lambda item_id, n: records[sound_record_of(item_id, n)])

    @cached_property
    def latest(self) -> Latest | None:
        data = self.kept.records.get(LATEST)
        return None if data is None else msgspec.msgpack.decode(data, type=Latest)

    @property
    def knows_sound(self) -> bool:
        """Whether the client has got audio of the latest response."""
        latest = self.latest
        if latest is None:
            return False
        if self.heard_item is not None:
            return self.heard_item == latest.item
        return latest.audio_at is not None and not self.lacks(latest.audio_at + 1)

    @property
    def latest_heard_s(self) -> float:
        """What the client has heard of the latest response."""
        if self.latest is None or not self.knows_sound:
            return 0.0
        return self.latest.heard_s if self.heard_s is None else self.heard_s

    def lacks(self, at: int | None) -> bool:
        """Whether the client may not have got the events before this one."""
        return at is not None and self.after is not None and self.after + 1 < at

    def lacked_items(self) -> set[str]:
        # Of an earlier epoch, the gateway of this one has told of it when the client came.
        now = [(item_id, one.at) for item_id, one in self._placed if one.epoch == self.kept.epoch]
        return {item_id for item_id, at in now if self.lacks(at)}

    def unfinished(self, now_s: float) -> Unfinished | None:
        """The latest response, if its client may have something of it to hear or to learn."""
        latest = self.latest
        if latest is None:
            return None
        by_id = {item.id: item for item in self.items}
        item = by_id.get(latest.item or "")
        is_lacked = latest.done_at is None or self.lacks(latest.done_at)
        status, reason = "in_progress", None
        if latest.done_at is not None and (
            not is_lacked or latest.calls or latest.begun is None or latest.status == "cancelled"
        ):
            status, reason = latest.status, latest.reason
        elif latest.has_context:
            status = "lost"
        plan = ResponsePlan(
            config=latest.config or self.config,
            decided_at_s=now_s,
            instructed=latest.instructed,
            metadata=latest.metadata,
            response_id=latest.response_id,
            begun=latest.begun,
        )
        known = [n for at, n in latest.marks if not self.lacks(at)]
        return Unfinished(
            plan=plan,
            item=item if isinstance(item, AssistantItem) else None,
            calls=tuple(
                one
                for call_id in latest.calls
                if isinstance(one := by_id.get(call_id), FunctionCallItem)
            ),
            after_id=latest.after,
            status=status,
            reason=reason,
            heard_s=self.latest_heard_s,
            n_known=max(known, default=0),
            lacks_creation=self.lacks(latest.created_at),
            lacks_item=self.lacks(latest.opened_at),
            lacks_end=is_lacked,
        )


async def find_call(
    journal: Journal,
    token: str,
    owner: str,
    after: str | None,
    heard_ms: float | None,
    heard_item: str | None,
) -> SavedCall:
    """
    Args:
        after, heard_ms: see Resumption.join. heard_item: see SavedCall.
    Raises:
        ResumeTokenError: there is no such call, or it is another owner's.
        ClientEventError: `after` is no event of this call.
        StoreError: the journal cannot be reached.
    """
    try:
        kept = await journal.find(session_of(token), token)
        if kept is None:
            raise ResumeTokenError
        head = msgspec.msgpack.decode(kept.records[HEAD], type=Head)
        if head.form != FORM or head.owner != journal.key.digest("owner", owner):
            raise ResumeTokenError
        config = msgspec.msgpack.decode(kept.records[CONFIG], type=SessionConfig)
        number = None if after is None else number_of(after, head.prefix)
        if number == -1 and all(number_of(after or "", one) == -1 for one in head.earlier):
            raise not_kept("after", "events after that one")
        heard_s = None if heard_ms is None else heard_ms / 1000
        saved = SavedCall(journal, kept, head, config, number, heard_s, heard_item)
        saved.unfinished(0.0)  # all of it can be read
    except (msgspec.DecodeError, KeyError, UnreadableRecordError) as error:
        # Of another version of the server, or another fleet's.
        log.warning("session_unreadable session=%s error=%r", session_of(token), error)
        raise ResumeTokenError from error
    return saved
