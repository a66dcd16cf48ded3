"""Reader of a chat completion's messages into a turn's history.

In: Messages. Out: instructions and HistoryItems, or ClientEventError with the message's path.
"""

import binascii

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.errors import BadInputError
from sglang_live.gateway.chat.messages import AudioPart as AudioForm
from sglang_live.gateway.chat.messages import Message, SpokenAnswers, read_messages
from sglang_live.gateway.chat.messages import TextPart as TextForm
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.http.uploads import read_audio
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.realtime.conversation.items import call_as_text


def history_of(
    messages: list[Message], answers: SpokenAnswers, *, max_audio_s: float
) -> tuple[str, tuple[HistoryItem, ...]]:
    """The instructions, and the history without them.

    Args:
        answers: earlier ones, to which messages may refer.
        max_audio_s: seconds of audio in all messages together.
    Raises:
        ClientEventError: see read_messages; audio that cannot be read, or no message.
    """
    reading = _Reading(max_audio_s)
    instructions: list[str] = []
    items: list[HistoryItem] = []
    for n, message in enumerate(read_messages(messages, answers)):
        if message.role == "system" or message.role == "developer":
            parts = [part.text for part in message.parts if isinstance(part, TextForm)]
            instructions += [text for text in parts if text]
        else:
            items += reading.items(message, f"messages[{n}]")
    if not items:
        raise ClientEventError("There is no message to respond to.", param="messages")
    return "\n\n".join(instructions), tuple(items)


class _Reading:
    """State from message to message: seconds of audio left."""

    def __init__(self, left_s: float):
        self._left_s = left_s

    def items(self, message: Message, at: str) -> list[HistoryItem]:
        """None for an answer that said nothing."""
        assert message.role != "system" and message.role != "developer"
        parts: list[TextPart | AudioPart] = []
        for n, part in enumerate(message.parts):
            if isinstance(part, TextForm):
                parts.append(TextPart(part.text))
            elif isinstance(part, AudioForm):
                at_data = f"{at}.content[{n}].input_audio.data"
                parts.append(self._audio(part.input_audio.data, at_data))
        found = []
        if message.text or message.role != "assistant":
            found.append(HistoryItem(key=new_id("key"), role=message.role, parts=tuple(parts)))
        for call in message.tool_calls or ():
            found.append(call_as_text(call.function.name, call.function.arguments or ""))
        return found

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
