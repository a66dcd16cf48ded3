"""Checks the order of a server's events: creation before use, one end, deltas that add up.

In: the events of one connection. Out: AssertionError on the first that breaks a rule.
"""

from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

# By name of a part's delta events: the field of the `done` event with the whole.
_WHOLE = {
    "output_text": "text",
    "output_audio_transcript": "transcript",
    "output_audio": None,
}


@dataclass
class _Part:
    """A content part.

    said: contents of its deltas, by their name.
    ended: names whose done event has arrived.
    """

    said: dict[str, list[str]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    closed: bool = False


@dataclass
class _Output:
    """An unfinished item of a response."""

    item_id: str
    kind: str
    call_id: str | None = None
    parts: list[_Part] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    whole_arguments: str | None = None
    closed: bool = False


@dataclass
class _Response:
    conversation: bool
    outputs: list[_Output] = field(default_factory=list)


@dataclass
class EventOrder:
    _seen_ids: set[str] = field(default_factory=set)
    _greeted: bool = False
    _running: dict[str, _Response] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _items: list[str] = field(default_factory=list)  # in the conversation
    _unfinished: set[str] = field(default_factory=set)  # of those: `added`, not yet `done`
    _cut: set[str] = field(default_factory=set)  # truncated items: shorter than what was sent
    _speaking: str | None = None
    _committed: str | None = None  # must be added next
    _said: set[str] = field(default_factory=set)  # items of the user's audio, also announced ones
    _commits: set[str] = field(default_factory=set)  # of those: committed
    _transcripts: dict[str, list[str] | None] = field(default_factory=dict)  # None: over

    @property
    def item_ids(self) -> tuple[str, ...]:
        return tuple(self._items)

    def see(self, event: Event) -> None:
        assert event["event_id"] not in self._seen_ids, f"an event_id twice: {event}"
        self._seen_ids.add(event["event_id"])
        kind = event["type"]
        if not self._greeted:
            assert kind in ("session.created", "error"), f"first of all {kind}"
            self._greeted = True
        elif kind == "session.created":
            raise AssertionError("greeted twice")
        if kind.startswith("output_audio_buffer."):  # a response is made before it is heard
            known = self._running.keys() | self._over
            assert event["response_id"] in known, f"no such response: {event}"
        elif "response_id" in event:
            assert event["response_id"] in self._running, f"no such response runs: {event}"
        handler = _HANDLERS.get(kind)
        if handler:
            handler(self, event)

    # --- responses ---

    def _response_created(self, event: Event) -> None:
        response = event["response"]
        assert response["id"] not in self._running and response["id"] not in self._over
        assert (response["status"], response["output"]) == ("in_progress", [])
        in_conversation = response["conversation_id"] is not None
        others = any(other.conversation for other in self._running.values())
        assert not (in_conversation and others), "two responses in the conversation"
        self._running[response["id"]] = _Response(in_conversation)

    def _response_done(self, event: Event) -> None:
        response = event["response"]
        made = self._running.pop(response["id"])
        self._over.add(response["id"])
        assert response["status"] in ("completed", "cancelled", "incomplete", "failed")
        if response["status"] != "completed":
            assert response["status_details"]["type"] == response["status"]
        assert [item["id"] for item in response["output"]] == [o.item_id for o in made.outputs]
        assert all(output.closed for output in made.outputs), "over before its items"
        if made.conversation:
            left = self._unfinished & {output.item_id for output in made.outputs}
            assert not left, f"over before {left} were done"

    def _item_added(self, event: Event) -> None:
        item, outputs = event["item"], self._running[event["response_id"]].outputs
        assert item["status"] == "in_progress"
        assert event["output_index"] == len(outputs)
        assert all(output.closed for output in outputs), "two items at once"
        outputs.append(_Output(item["id"], item["type"], item.get("call_id")))

    def _item_done(self, event: Event) -> None:
        output, item = self._output(event, event["item"]["id"]), event["item"]
        assert item["status"] in ("completed", "incomplete")
        assert all(part.closed for part in output.parts), "done before its parts"
        if output.kind == "function_call":
            assert item["arguments"] == output.whole_arguments
            assert item["call_id"] == output.call_id
        output.closed = True

    def _part_added(self, event: Event) -> None:
        output = self._output(event)
        assert event["content_index"] == len(output.parts)
        if self._running[event["response_id"]].conversation:
            assert output.item_id in self._items, "content of an item that was not added"
        output.parts.append(_Part())

    def _part_done(self, event: Event) -> None:
        part = self._part(event)
        assert part.ended >= part.said.keys(), "closed before its deltas were summed up"
        part.closed = True
        for name in ("text", "transcript"):
            whole = event["part"].get(name)
            for said in ("output_text", "output_audio_transcript"):
                if said in part.said and whole is not None:
                    self._check_whole(event, whole, part.said[said])

    def _delta(self, event: Event) -> None:
        name = event["type"].split(".")[1]
        part = self._part(event)
        assert name not in part.ended, f"a delta of {name} after its end"
        part.said.setdefault(name, []).append(event["delta"])

    def _delta_done(self, event: Event) -> None:
        name = event["type"].split(".")[1]
        part = self._part(event)
        assert name not in part.ended, f"{name} ended twice"
        part.ended.add(name)
        if whole := _WHOLE[name]:
            self._check_whole(event, event[whole], part.said.get(name, []))

    def _check_whole(self, event: Event, whole: str, said: list[str]) -> None:
        if event["item_id"] not in self._cut:
            assert whole == "".join(said), f"{whole!r} is not what came in pieces: {said}"

    def _arguments_delta(self, event: Event) -> None:
        output = self._output(event)
        assert output.call_id == event["call_id"] and output.whole_arguments is None
        output.arguments.append(event["delta"])

    def _arguments_done(self, event: Event) -> None:
        output = self._output(event)
        assert output.call_id == event["call_id"] and output.whole_arguments is None
        if self._running[event["response_id"]].conversation:
            assert output.item_id in self._items
        assert event["arguments"] == "".join(output.arguments)
        output.whole_arguments = event["arguments"]

    def _output(self, event: Event, item_id: str | None = None) -> _Output:
        outputs = self._running[event["response_id"]].outputs
        assert event["output_index"] == len(outputs) - 1, "not of the item being made"
        output = outputs[-1]
        assert output.item_id == (item_id or event["item_id"]) and not output.closed
        return output

    def _part(self, event: Event) -> _Part:
        output = self._output(event)
        assert event["content_index"] == len(output.parts) - 1, "not of the part being made"
        part = output.parts[-1]
        assert not part.closed, "of a part that is closed"
        return part

    # --- the conversation ---

    def _conversation_added(self, event: Event) -> None:
        item_id, previous = event["item"]["id"], event["previous_item_id"]
        assert item_id not in self._items, "an item twice"
        assert previous is None or previous in self._items, "after an unknown item"
        assert self._committed in (None, item_id), "not the turn that was committed"
        self._committed = None
        self._items.append(item_id)
        self._unfinished.add(item_id)

    def _conversation_done(self, event: Event) -> None:
        self._unfinished.remove(event["item"]["id"])

    def _conversation_deleted(self, event: Event) -> None:
        self._items.remove(event["item_id"])
        self._unfinished.discard(event["item_id"])

    def _conversation_retrieved(self, event: Event) -> None:
        assert event["item"]["id"] in self._items

    def _conversation_truncated(self, event: Event) -> None:
        assert event["item_id"] in self._items
        self._cut.add(event["item_id"])

    # --- the user's speech ---

    def _speech_started(self, event: Event) -> None:
        assert self._speaking is None, "speech started twice"
        self._speaking = event["item_id"]
        self._said.add(event["item_id"])

    def _speech_stopped(self, event: Event) -> None:
        assert self._speaking == event["item_id"], "speech of another item stopped"
        self._speaking = None

    def _audio_committed(self, event: Event) -> None:
        assert self._committed is None and self._speaking is None
        assert event["item_id"] not in self._items
        self._committed = event["item_id"]
        self._said.add(event["item_id"])
        self._commits.add(event["item_id"])

    def _audio_cleared(self, event: Event) -> None:
        self._speaking = None

    def _transcript_delta(self, event: Event) -> None:
        assert event["item_id"] in self._said, "a transcript of an unknown item"
        said = self._transcripts.setdefault(event["item_id"], [])
        assert said is not None, "a transcript delta after its end"
        said.append(event["delta"])

    def _transcript_over(self, event: Event) -> None:
        assert event["item_id"] in self._commits, "the end of a transcript before its item"
        said = self._transcripts.get(event["item_id"], [])
        assert said is not None, "a second end of the transcript"
        if "transcript" in event:
            assert event["transcript"] == "".join(said).strip()
        self._transcripts[event["item_id"]] = None


_HANDLERS = {
    "response.created": EventOrder._response_created,
    "response.done": EventOrder._response_done,
    "response.output_item.added": EventOrder._item_added,
    "response.output_item.done": EventOrder._item_done,
    "response.content_part.added": EventOrder._part_added,
    "response.content_part.done": EventOrder._part_done,
    "response.function_call_arguments.delta": EventOrder._arguments_delta,
    "response.function_call_arguments.done": EventOrder._arguments_done,
    "conversation.item.added": EventOrder._conversation_added,
    "conversation.item.done": EventOrder._conversation_done,
    "conversation.item.deleted": EventOrder._conversation_deleted,
    "conversation.item.retrieved": EventOrder._conversation_retrieved,
    "conversation.item.truncated": EventOrder._conversation_truncated,
    "input_audio_buffer.speech_started": EventOrder._speech_started,
    "input_audio_buffer.speech_stopped": EventOrder._speech_stopped,
    "input_audio_buffer.committed": EventOrder._audio_committed,
    "input_audio_buffer.cleared": EventOrder._audio_cleared,
    "conversation.item.input_audio_transcription.delta": EventOrder._transcript_delta,
    "conversation.item.input_audio_transcription.completed": EventOrder._transcript_over,
    "conversation.item.input_audio_transcription.failed": EventOrder._transcript_over,
    **{f"response.{name}.delta": EventOrder._delta for name in _WHOLE},
    **{f"response.{name}.done": EventOrder._delta_done for name in _WHOLE},
}
