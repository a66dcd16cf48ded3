"""Work that a Live session delegates to a text model, as OpenAI's Responses API shows it.

In: delegations of the voice, items and response.create of the client. Out: response.event, one
after another; the result, which the voice speaks about.
Owner: one Backend per session that delegates to responses. The text model reads the conversation,
then what the backend has added to it. Functions are the client's; a response continues when every
call has its output. One response runs at a time.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

import orjson

from sglang_live.aio import background
from sglang_live.core import Usage
from sglang_live.errors import CapacityError, LiveError
from sglang_live.gateway.errors import ClientEventError, cut, error_body, internal_error
from sglang_live.gateway.json_forms import Strict, read_value, unsupported_parameter
from sglang_live.gateway.live.broadcast import Broadcast
from sglang_live.gateway.live.text_server import TextServer
from sglang_live.gateway.live.voice import Voice
from sglang_live.gateway.live.work import (
    BackendSettings,
    Item,
    Task,
    TextModel,
    Worked,
    message,
    usage_json,
)
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.tools import FunctionCall, read_calls
from sglang_live.ids import new_id

log = logging.getLogger(__name__)

# Of what the client adds before a response.
_MAX_ITEMS, _MAX_BYTES = 128, 32_768
# Messages of the backend that later responses read.
_MAX_CHAIN = 256
# Responses that wait for the one that runs.
_MAX_WAITING = 4
_WIND_DOWN_S = 1.0
_TASK = (
    "You work behind a voice agent. The conversation so far follows. Do what the user has asked "
    "for last; the agent tells the user your answer."
)
_FAILED = "The task could not be done."


class _PartForm(Strict):
    text: str
    type: Literal["input_text", "output_text", "text"] = "input_text"


class _MessageForm(Strict):
    """id, status, phase: no effect."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_PartForm]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _OutputForm(Strict):
    """id, status: no effect."""

    call_id: str
    output: str
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: str | None = None


class Backend:
    """A Worker (work.py)."""

    def __init__(
        self,
        voice: Voice,
        outbox: Broadcast,
        parts: GatewayParts,
        owner: str,
        settings: BackendSettings,
        served: TextModel,
    ):
        """served: the served model. For other names the operator's text model takes its place."""
        self.settings = settings
        self._served = served
        self._voice = voice
        self._outbox = outbox
        self._parts = parts
        self._owner = owner
        self._chain: deque[Item] = deque(maxlen=_MAX_CHAIN)
        self._added: list[Item] = []  # since the last response
        self._added_bytes = 0
        self._unanswered: set[str] = set()  # calls of the client
        self._continues: str | None = None  # delegation whose calls these are
        self._waiting: deque[tuple[str | None, str]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._n_events = 0

    @property
    def at_work(self) -> bool:
        return self._running is not None

    def delegate(self, delegation_id: str) -> dict[str, Any]:
        return {"target": "responses", "response_id": self._start(delegation_id)}

    def add_item(self, item: dict[str, Any]) -> None:
        """Add an input item of the client.

        Raises:
            ClientEventError: it is malformed or not supported, an output has no call or a second
                one, or there is too much of it.
        """
        kind = item.get("type", "message")
        size = len(orjson.dumps(item))
        if len(self._added) >= _MAX_ITEMS or self._added_bytes + size > _MAX_BYTES:
            raise ClientEventError(
                f"At most {_MAX_ITEMS} items and {_MAX_BYTES} bytes before a response.",
                code="response_input_buffer_full",
                param="item",
            )
        if kind == "function_call_output":
            form = read_value(item, _OutputForm, "item")
            if form.call_id not in self._unanswered:
                raise ClientEventError(
                    f"No call '{cut(form.call_id)}' waits for an output.", param="item.call_id"
                )
            self._unanswered.discard(form.call_id)
            added = {"type": kind, "call_id": form.call_id, "output": form.output}
        elif kind == "message":
            written = read_value(item, _MessageForm, "item")
            parts = written.content
            text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
            added = message(written.role, text)
        else:
            raise unsupported_parameter("item.type", "is message or function_call_output.")
        self._added.append(added)
        self._added_bytes += size

    def create(self) -> None:
        """Start a response, or continue the one whose calls are answered.

        Raises:
            ClientEventError: a call has no output yet, or too many responses wait.
        """
        if self._unanswered:
            raise ClientEventError(
                f"Calls without an output: {', '.join(sorted(self._unanswered))}.",
                code="function_call_outputs_required",
                param="type",
            )
        if len(self._waiting) >= _MAX_WAITING:
            raise ClientEventError("Too many responses wait.", code="too_many_responses")
        delegation_id, self._continues = self._continues, None
        self._start(delegation_id)

    def stop(self) -> None:
        self._waiting.clear()
        if self._running is not None:
            self._running.cancel()

    async def close(self) -> None:
        self.stop()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_WIND_DOWN_S)

    def _start(self, delegation_id: str | None) -> str:
        self._chain += self._added
        self._added, self._added_bytes = [], 0
        response_id = new_id("resp")
        self._waiting.append((delegation_id, response_id))
        if self._running is None:
            self._running = background(self._work(), "delegated work")
        return response_id

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._respond(*self._waiting.popleft())
        finally:
            self._running = None

    async def _respond(self, delegation_id: str | None, response_id: str) -> None:
        response = _Response(
            self.settings, response_id, lambda event: self._emit(delegation_id, event)
        )
        response.begin()
        try:
            text, calls = await self._run(response)
        except LiveError as error:
            log.warning("delegation_failed response=%s code=%s", response_id, error.code)
            response.fail(error)
            await self._tell(_FAILED, delegation_id)
            return
        except Exception:
            log.exception("delegation_crashed response=%s", response_id)
            response.fail(internal_error())
            await self._tell(_FAILED, delegation_id)
            return
        for call_id, call in calls:
            written = {"call_id": call_id, "name": call.name, "arguments": call.arguments}
            self._chain.append({"type": "function_call", **written})
            self._unanswered.add(call_id)
            self._continues = delegation_id
        response.complete()
        if not calls:
            self._chain.append(message("assistant", text))
            await self._tell(text or _FAILED, delegation_id)

    async def _run(self, response: "_Response") -> tuple[str, list[tuple[str, FunctionCall]]]:
        """Returns the text and the calls, with their ids."""
        settings, parts = self.settings, self._parts
        parts.drain.check()
        await parts.rate_limits.take(self._owner)
        if parts.out_of_band_slots.full:
            raise CapacityError("Too much delegated work of all sessions at once.")
        instructions = f"{settings.instructions}\n\n{_TASK}" if settings.instructions else _TASK
        task = Task(
            settings=settings,
            instructions=instructions,
            conversation=self._voice.transcript(),
            items=self._whole_chain(),
        )
        worked: Worked | None = None
        parts.out_of_band_slots.take()
        try:
            async with aclosing(self._model.work(task)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Worked):
                        worked = piece
                    else:
                        response.add_text(piece)
        finally:
            parts.out_of_band_slots.release()
        assert worked is not None, "a text model that does not fail ends"
        calls, malformed = read_calls(
            worked.calls,
            settings.tools,
            most=None if settings.parallel_tool_calls else 1,
            metrics=parts.metrics,
            response_id=response.id,
        )
        if not calls and not response.text:
            response.add_text(malformed)
        response.end(worked)
        return response.text, [(response.add_call(call), call) for call in calls]

    @property
    def _model(self) -> TextModel:
        config = self._parts.config.text_server
        is_served = self.settings.model == self._parts.orchestrator.model_name
        return self._served if config.live_backend is None or is_served else TextServer(config)

    def _whole_chain(self) -> tuple[Item, ...]:
        """Without outputs whose calls are too old: a text model refuses those."""
        called = {item["call_id"] for item in self._chain if item["type"] == "function_call"}
        return tuple(
            item
            for item in self._chain
            if item["type"] != "function_call_output" or item["call_id"] in called
        )

    async def _tell(self, text: str, delegation_id: str | None) -> None:
        try:
            await self._voice.append("commentary", text, delegation_id)
        except LiveError as error:
            self._parts.metrics.errors.labels(error.code).inc()
            log.warning("result_untold code=%s", error.code)

    def _emit(self, delegation_id: str | None, event: dict[str, Any]) -> None:
        shown: dict[str, Any] = {} if delegation_id is None else {"delegation_id": delegation_id}
        numbered = {**event, "sequence_number": self._n_events}
        self._n_events += 1
        self._outbox.emit("response.event", event=numbered, **shown)


class _Response:
    """The events of one response. Snapshots repeat neither its input nor its output."""

    def __init__(
        self, settings: BackendSettings, response_id: str, emit: Callable[[dict[str, Any]], None]
    ):
        self.id = response_id
        self.text = ""
        self._settings = settings
        self._emit = emit
        self._created_at = int(time.time())
        self._message_id: str | None = None
        self._n_items = 0
        self._status = "in_progress"
        self._usage: Usage | None = None

    def begin(self) -> None:
        self._emit({"type": "response.created", "response": self._snapshot()})
        self._emit({"type": "response.in_progress", "response": self._snapshot()})

    def add_text(self, text: str) -> None:
        if not text:
            return
        if self._message_id is None:
            self._message_id = new_id("msg")
            self._n_items = 1
            self._emit_item("added", self._message("in_progress", []), 0)
            self._emit_part("response.content_part.added", part=_part(""))
        self.text += text
        self._emit_part("response.output_text.delta", delta=text, logprobs=[])

    def end(self, worked: Worked) -> None:
        """Its text is complete."""
        self._usage = worked.usage
        self._status = "incomplete" if worked.is_cut else "completed"
        if self._message_id is not None:
            self._emit_part("response.output_text.done", text=self.text, logprobs=[])
            self._emit_part("response.content_part.done", part=_part(self.text))
            self._emit_item("done", self._message(self._status, [_part(self.text)]), 0)

    def add_call(self, call: FunctionCall) -> str:
        """Returns the id of the call."""
        at, self._n_items = self._n_items, self._n_items + 1
        item = {
            "type": "function_call",
            "id": new_id("fc"),
            "call_id": new_id("call"),
            "name": call.name,
        }
        address = {"item_id": item["id"], "output_index": at}
        self._emit_item("added", {**item, "arguments": "", "status": "in_progress"}, at)
        kind = "response.function_call_arguments"
        self._emit({"type": f"{kind}.delta", "delta": call.arguments, **address})
        done = {"arguments": call.arguments, "name": call.name, **address}
        self._emit({"type": f"{kind}.done", **done})
        whole = {**item, "arguments": call.arguments, "status": "completed"}
        self._emit_item("done", whole, at)
        return item["call_id"]

    def complete(self) -> None:
        self._emit({"type": f"response.{self._status}", "response": self._snapshot()})

    def fail(self, error: LiveError) -> None:
        self._status = "failed"
        body = error_body(error)
        shown = {"code": body["code"], "message": body["message"]}
        self._emit({"type": "response.failed", "response": {**self._snapshot(), "error": shown}})

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"type": "message", "id": self._message_id, "role": "assistant"}
        return {**message, "status": status, "content": content}

    def _emit_item(self, what: str, item: dict[str, Any], at: int) -> None:
        self._emit({"type": f"response.output_item.{what}", "output_index": at, "item": item})

    def _emit_part(self, kind: str, **fields: Any) -> None:
        address = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._emit({"type": kind, **address, **fields})

    def _snapshot(self) -> dict[str, Any]:
        cut_short = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "error": None,
            "incomplete_details": cut_short,
            "instructions": None,
            "metadata": {},
            "model": self._settings.model,
            "output": [],
            "parallel_tool_calls": self._settings.parallel_tool_calls,
            "tool_choice": "auto",
            "tools": [],
            "usage": usage_json(self._usage) if self._usage else None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
