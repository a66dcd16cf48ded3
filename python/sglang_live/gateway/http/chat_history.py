"""Reader of a chat completion's messages into a turn's history.

In: Messages. Out: instructions and HistoryItems, or ClientEventError with the message's path.
"""

import binascii

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.errors import BadInputError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.http.chat_schema import Message, ToolCallForm
from sglang_live.gateway.http.chat_schema import TextPart as TextForm
from sglang_live.gateway.http.uploads import read_audio
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.json_forms import missing_parameter
from sglang_live.gateway.realtime.conversation.item_schema import check_arguments
from sglang_live.gateway.realtime.conversation.items import call_as_text
from sglang_live.gateway.tools import check_name

# Fields that only one role can have.
_ROLE_OF = {"audio": "assistant", "tool_calls": "assistant", "tool_call_id": "tool"}


def history_of(
    messages: list[Message], transcripts: dict[str, str], *, max_audio_s: float
) -> tuple[str, tuple[HistoryItem, ...]]:
    """The instructions, and the history without them.

    Args:
        transcripts: of earlier completions, by audio id.
        max_audio_s: seconds of audio in all messages together.
    Raises:
        ClientEventError: content that a role cannot have, an unknown audio id, an output without
            a function call, or no message.
    """
    reading = _Reading(transcripts, max_audio_s)
    instructions: list[str] = []
    items: list[HistoryItem] = []
    for n, message in enumerate(messages):
        at = f"messages[{n}]"
        _check_role(message, at)
        if message.role in ("system", "developer"):
            parts = reading.parts(message, at)  # refuses audio in these roles
            instructions += [part.text for part in parts if isinstance(part, TextPart)]
        else:
            items += reading.items(message, at)
    if not items:
        raise ClientEventError("There is no message to respond to.", param="messages")
    return "\n\n".join(instructions), tuple(items)


def _check_role(message: Message, at: str) -> None:
    for name, role in _ROLE_OF.items():
        if getattr(message, name) is not None and message.role != role:
            raise ClientEventError(
                f"{at}: a {message.role} message cannot have {name}.", param=f"{at}.{name}"
            )


class _Reading:
    """State from message to message: seconds of audio left, ids of function calls."""

    def __init__(self, transcripts: dict[str, str], left_s: float):
        self._transcripts, self._left_s = transcripts, left_s
        self._call_ids: set[str] = set()

    def items(self, message: Message, at: str) -> list[HistoryItem]:
        assert message.role != "system" and message.role != "developer"
        if message.role == "tool":
            self._check_output(message, at)
        parts = self.parts(message, at)
        if message.audio is not None:
            if message.audio.id not in self._transcripts:
                raise ClientEventError(
                    f"{at}: there is no audio {cut(message.audio.id)!r} any more. Send its "
                    "transcript as 'content'.",
                    param=f"{at}.audio.id",
                )
            parts.append(TextPart(self._transcripts[message.audio.id]))
        found = []
        if parts:
            found.append(HistoryItem(key=new_id("key"), role=message.role, parts=tuple(parts)))
        for n, call in enumerate(message.tool_calls or ()):
            found.append(self._call(call, f"{at}.tool_calls[{n}]"))
        if not found:
            raise ClientEventError(f"{at} is empty.", param=f"{at}.content")
        return found

    def parts(self, message: Message, at: str) -> list[TextPart | AudioPart]:
        content = message.content
        if isinstance(content, str):
            return [TextPart(content)] if content else []
        parts: list[TextPart | AudioPart] = []
        for n, part in enumerate(content or ()):
            place = f"{at}.content[{n}]"
            if isinstance(part, TextForm):
                parts.append(TextPart(part.text))
            elif message.role != "user":
                raise ClientEventError(
                    f"{at}: a {message.role} message cannot hold audio.", param=f"{place}.type"
                )
            else:
                parts.append(self._audio(part.input_audio.data, f"{place}.input_audio.data"))
        return parts

    def _audio(self, text: str, at: str) -> AudioPart:
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError):
            raise ClientEventError(f"{at} is not base64.", param=at) from None
        try:
            audio = read_audio(data, max_s=self._left_s)
        except BadInputError as error:
            raise ClientEventError(f"{at}: {error}", code=error.code, param=at) from None
        self._left_s -= audio.duration_s
        return audio

    def _call(self, call: ToolCallForm, at: str) -> HistoryItem:
        function = call.function
        check_name(function.name, f"{at}.function.name")
        check_arguments(function.arguments, f"{at}.function.arguments")
        self._call_ids.add(call.id)
        return call_as_text(function.name, function.arguments)

    def _check_output(self, message: Message, at: str) -> None:
        at = f"{at}.tool_call_id"
        if message.tool_call_id is None:
            raise missing_parameter(at)
        if message.tool_call_id not in self._call_ids:
            raise ClientEventError(
                f"Tool call ID {cut(message.tool_call_id)!r} not found in the messages before.",
                code="invalid_tool_call_id",
                param=at,
            )
