"""The served model as the text model of delegated work: stateless turns without a listener."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sglang_live.core import HistoryItem, Role, TextPart, TranscriptDelta, TurnDone, TurnRequest
from sglang_live.errors import StageFailedError
from sglang_live.gateway.auth import owner_salt
from sglang_live.gateway.call.conversation.items import call_as_text
from sglang_live.gateway.live.voice import Voice
from sglang_live.gateway.live.work import Item, Task, Worked
from sglang_live.gateway.tools import tools_of
from sglang_live.ids import new_id
from sglang_live.orchestrator.sessions import VoiceSession

_ROLES: dict[str, Role] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


class ServedText:
    """A TextModel (work.py). It knows the conversation as the voice does, with its sound."""

    def __init__(self, session: VoiceSession, voice: Voice, owner: str):
        self._session = session
        self._voice = voice
        self._owner = owner

    async def work(self, task: Task) -> AsyncGenerator[str | Worked, None]:
        settings = task.settings
        request = TurnRequest(
            instructions=task.instructions,
            history=(*self._voice.conversation(), *map(as_history, task.items)),
            voice="",
            wants_audio=False,
            max_output_tokens=settings.max_output_tokens,
            stateless=True,
            tools=tools_of(settings.tools, settings.tool_choice),
            cache_salt=owner_salt(self._owner),
        )
        done: TurnDone | None = None
        async with aclosing(self._session.respond(request)) as events:
            async for event in events:
                if isinstance(event, TranscriptDelta):
                    yield event.text
                elif isinstance(event, TurnDone):
                    done = event
        if done is None:
            raise StageFailedError("The turn ended without a result.")
        yield Worked(tuple(done.function_calls), done.usage, done.status == "incomplete")


def as_history(item: Item) -> HistoryItem:
    """As the served model reads it."""
    if item["type"] == "function_call":
        return call_as_text(item["name"], item["arguments"])
    is_output = item["type"] == "function_call_output"
    text = item["output"] if is_output else item["content"]
    role: Role = "tool" if is_output else _ROLES[item["role"]]
    return HistoryItem(key=new_id("key"), role=role, parts=(TextPart(text),))
