"""Typed questions about a Live session's conversation, answered with the model's own probabilities.

In: delegations of the voice, decision.create and items of the client. Out: decision.event.
Owner: one Decisions per session that delegates to decisions. Each question is a stateless turn of
the served model: it reads the conversation in words, the client's items and the question with its
options. Nothing is drawn: the answer is the probability of each option (stages/thinker/choice.py).
Options that begin alike for the model are letters. One decision runs at a time.
"""

import asyncio
import logging
import string
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from sglang_live.aio import background
from sglang_live.core import TurnDone, TurnRequest, Usage
from sglang_live.errors import CapacityError, LiveError, OptionsAlikeError, StageFailedError
from sglang_live.gateway.auth import owner_salt
from sglang_live.gateway.errors import ClientEventError, cut, internal_error
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.decision_items import read_item
from sglang_live.gateway.live.events import (
    ChoiceForm,
    JsonPartForm,
    PredicateForm,
    Question,
    ScoreForm,
    Told,
)
from sglang_live.gateway.live.served_text import as_history
from sglang_live.gateway.live.voice import Voice
from sglang_live.gateway.live.work import Item, message, usage_json
from sglang_live.gateway.parts import GatewayParts
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

_MAX_ITEMS, _MAX_BYTES = 128, 32_768
# Decisions that wait for the one that runs.
_MAX_WAITING = 4
_MAX_EVENT_IDS = 4096
_WIND_DOWN_S = 1.0
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_TASK = "You judge the conversation that follows. Answer each question with one of its options."


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSettings:
    """model: the client's name for it."""

    model: str
    questions: tuple[Question, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"model": self.model, "questions": msgspec.to_builtins(self.questions)}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """event_id: of decision.create; None: the voice has delegated."""

    delegation_id: str | None
    event_id: str | None


class Decisions:
    """A Worker (work.py)."""

    def __init__(
        self,
        session: VoiceSession,
        voice: Voice,
        outbox: Broadcast,
        parts: GatewayParts,
        owner: str,
        settings: DecisionSettings,
        refuse: Callable[[LiveError, str | None], None],
    ):
        """refuse: called with an error, and the id of the client's event that it answers."""
        self.settings = settings
        self._session = session
        self._voice = voice
        self._outbox = outbox
        self._parts = parts
        self._owner = owner
        self._refuse = refuse
        self._items: dict[str, tuple[Item, int]] = {}  # with their sizes
        self._seen: set[str] = set()
        self._waiting: deque[_Wanted] = deque()
        self._running: asyncio.Task[None] | None = None

    @property
    def at_work(self) -> bool:
        return self._running is not None

    def delegate(self, delegation_id: str) -> dict[str, Any]:
        if len(self._waiting) < _MAX_WAITING:
            self._start(_Wanted(delegation_id, None))
        else:
            self._refuse(_too_many(), None)
        return {"target": "decisions"}

    def create(self, event_id: str) -> None:
        """
        Raises:
            ClientEventError: the id was used before, or too many decisions wait.
        """
        if event_id in self._seen or len(self._seen) >= _MAX_EVENT_IDS:
            raise ClientEventError(
                "decision.create needs an event_id that is new.",
                code="duplicate_event_id",
                param="event_id",
            )
        if len(self._waiting) >= _MAX_WAITING:
            raise _too_many()
        self._seen.add(event_id)
        self._start(_Wanted(None, event_id))

    def add_item(self, sent: dict[str, Any]) -> dict[str, Any]:
        """Add an item for all later decisions. Returns it with its id.

        Raises:
            ClientEventError: it is malformed or not supported, or there is too much of it.
        """
        item, size = read_item(sent), len(orjson.dumps(sent))
        held = sum(size for _, size in self._items.values())
        if len(self._items) >= _MAX_ITEMS or held + size > _MAX_BYTES:
            raise ClientEventError(
                f"At most {_MAX_ITEMS} items and {_MAX_BYTES} bytes.",
                code="decision_items_full",
                param="item",
            )
        item_id = sent.get("id") or new_id("item")
        if item_id in self._items:
            raise ClientEventError(f"There is an item '{cut(item_id)}'.", param="item.id")
        self._items[item_id] = item, size
        return {**sent, "id": item_id}

    def delete_item(self, item_id: str) -> None:
        """Raises ClientEventError if there is no such item."""
        if self._items.pop(item_id, None) is None:
            raise ClientEventError(f"There is no item '{cut(item_id)}'.", param="item_id")

    def stop(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()

    async def close(self) -> None:
        self.stop()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_WIND_DOWN_S)

    def _start(self, wanted: _Wanted) -> None:
        self._waiting.append(wanted)
        if self._running is None:
            self._running = background(self._work(), "decisions")

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._decide(self._waiting.popleft())
        finally:
            self._running = None

    async def _decide(self, wanted: _Wanted) -> None:
        try:
            decision = await self._decision()
        except LiveError as error:
            log.warning("decision_failed code=%s", error.code)
            return self._refuse(error, wanted.event_id)
        except Exception:
            log.exception("decision_crashed")
            return self._refuse(internal_error(), wanted.event_id)
        shown: dict[str, Any] = {"delegation_id": wanted.delegation_id}
        if wanted.event_id is not None:
            shown = {"client_event_id": wanted.event_id}
        event = {"type": "decision.completed", "decision": decision}
        self._outbox.emit("decision.event", event=event, **shown)

    async def _decision(self) -> dict[str, Any]:
        parts, settings = self._parts, self.settings
        parts.drain.check()
        await parts.rate_limits.take(self._owner)
        if parts.out_of_band_slots.full:
            raise CapacityError("Too much delegated work of all sessions at once.")
        known = (*self._voice.transcript(), *(item for item, _ in self._items.values()))
        usage, answers = Usage(), []
        parts.out_of_band_slots.take()
        try:
            for question in settings.questions:
                done = await self._ask(question, known)
                usage += done.usage
                answers.append(_answer(question, done.shares))
        finally:
            parts.out_of_band_slots.release()
        return {"answers": answers, "model": settings.model, "usage": usage_json(usage)}

    async def _ask(self, question: Question, known: tuple[Item, ...]) -> TurnDone:
        told = _options(question)
        lines = [f"- {name} ({about})" if about else f"- {name}" for name, about in told]
        try:
            return await self._choose(question, lines, tuple(name for name, _ in told), known)
        except StageFailedError as error:
            if error.reason != OptionsAlikeError.code:
                raise
            lines = [f"{letter}: {line[2:]}" for letter, line in zip(_LETTERS, lines, strict=False)]
            return await self._choose(question, lines, tuple(_LETTERS[: len(told)]), known)

    async def _choose(
        self,
        question: Question,
        lines: list[str],
        options: tuple[str, ...],
        known: tuple[Item, ...],
    ) -> TurnDone:
        asked = "\n".join([_text(question.instructions), "", *lines, "", "Which one?"])
        request = TurnRequest(
            instructions=_TASK,
            history=tuple(map(as_history, (*known, message("user", asked)))),
            voice="",
            wants_audio=False,
            stateless=True,
            options=options,
            cache_salt=owner_salt(self._owner),
        )
        async with aclosing(self._session.respond(request)) as events:
            async for event in events:
                if isinstance(event, TurnDone):
                    return event
        raise StageFailedError("The turn ended without a result.")


def _too_many() -> ClientEventError:
    return ClientEventError("Too many decisions wait.", code="too_many_decisions")


def _options(question: Question) -> list[tuple[str, str | None]]:
    """The name of each, and what is told of it."""
    match question:
        case PredicateForm():
            return [("Yes", None), ("No", None)]
        case ChoiceForm():
            return [(str(one.value), one.description) for one in question.choices]
        case ScoreForm():
            return [(one.label, one.description) for one in question.levels]


def _text(told: Told) -> str:
    if isinstance(told, str):
        return told
    return "\n".join(
        orjson.dumps(part.data).decode() if isinstance(part, JsonPartForm) else part.text
        for part in told
    )


def _answer(question: Question, shares: tuple[float, ...]) -> dict[str, Any]:
    name = {"name": question.name}
    likeliest = max(range(len(shares)), key=shares.__getitem__)
    match question:
        case PredicateForm():
            return {"type": "predicate", **name, "probability": shares[0]}
        case ChoiceForm():
            values = [one.value for one in question.choices]
            pairs = zip(values, shares, strict=True)
            return {
                "type": "choice",
                **name,
                "choice": values[likeliest],
                "confidence": shares[likeliest],
                "probabilities": [{"value": value, "probability": p} for value, p in pairs],
            }
        case ScoreForm():
            levels = [
                {"label": level.label, "value": n, "probability": p}
                for n, (level, p) in enumerate(zip(question.levels, shares, strict=True))
            ]
            return {
                "type": "score",
                **name,
                "score": sum(n * p for n, p in enumerate(shares)),
                "confidence": shares[likeliest],
                "probabilities": levels,
            }
