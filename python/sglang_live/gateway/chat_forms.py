"""A request for a chat completion, spoken or written: its shape, and the history it stands for.

In: OpenAI's JSON. Out: ChatForm, HistoryItems, or BadInputError.
"""

import binascii
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from sglang_live.errors import BadInputError
from sglang_live.gateway.http_body import read_json
from sglang_live.gateway.ids import new_id
from sglang_live.gateway.items import call_in_words
from sglang_live.gateway.realtime_events import VoiceRef, voice_name
from sglang_live.gateway.tool_calls import check_choice, check_tools
from sglang_live.gateway.uploads import read_audio
from sglang_live.orchestrator.history import AudioPart, HistoryItem, TextPart

MAX_TOKENS = 4096


class AudioOptions(Struct):
    """voice: as in the realtime protocol, other names speak with the model's first voice."""

    voice: str | VoiceRef | None = None
    format: Literal["wav", "mp3", "flac", "opus", "pcm16"] = "wav"


class StreamOptions(Struct):
    include_usage: bool = False


class _InputAudio(Struct):
    data: str
    format: str = "wav"


class _TextPart(Struct, tag="text"):
    text: str


class _AudioPart(Struct, tag="input_audio"):
    input_audio: _InputAudio


class _Function(Struct):
    name: str
    arguments: str = "{}"


class _ToolCall(Struct):
    function: _Function
    id: str = ""


class _AudioRef(Struct):
    id: str


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart | _AudioPart] | None = None
    audio: _AudioRef | None = None
    tool_calls: list[_ToolCall] | None = None


class _FunctionTool(Struct):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    type: Literal["function"]
    function: _FunctionTool


class ChatForm(Struct):
    messages: Annotated[list[Message], Meta(min_length=1)]
    modalities: list[Literal["text", "audio"]] = field(default_factory=lambda: ["text"])
    model: str | None = None
    audio: AudioOptions | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None

    @property
    def wants_audio(self) -> bool:
        return "audio" in self.modalities

    @property
    def voice(self) -> str | None:
        return voice_name(self.audio.voice) if self.audio else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def functions(self) -> tuple[dict[str, Any], ...]:
        """In the realtime protocol's form, as the rest of the gateway has them."""
        tools = (tool.function for tool in self.tools or ())
        return tuple(
            {"type": "function", "name": f.name}
            | ({"description": f.description} if f.description else {})
            | ({"parameters": f.parameters} if f.parameters else {})
            for f in tools
        )

    def choice(self) -> str | dict[str, Any]:
        """Raises BadInputError."""
        choice = self.tool_choice
        if choice is None or choice in ("auto", "none", "required"):
            return choice or "auto"
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise BadInputError("tool_choice is auto, none, required or names a function.")
        return {"type": "function", "name": name}


def read_chat(body: bytes) -> ChatForm:
    """Raises BadInputError that says where the request is wrong."""
    form = read_json(body, ChatForm)
    if form.stream and form.audio and form.audio.format != "pcm16":
        raise BadInputError("With 'stream' audio.format must be 'pcm16'.")
    functions = form.functions()
    check_tools(functions, path="tools")
    check_choice(functions, form.choice(), path="tool_choice")
    return form


def history_of(
    messages: list[Message], said_before: dict[str, str], *, max_audio_s: float
) -> tuple[str, tuple[HistoryItem, ...]]:
    """Instructions and what follows them.

    Args:
        said_before: transcripts of our earlier answers, by audio id.
        max_audio_s: of all messages together.
    Raises:
        BadInputError: content that a role cannot have, an unknown audio id, or no question.
    """
    instructions, items, left_s = [], [], max_audio_s
    for n, message in enumerate(messages):
        at = f"messages[{n}]"
        if message.role in ("system", "developer"):
            instructions += [part.text for part in _parts(message, at, left_s, spoken=False)]
            continue
        found = _items(message, at, said_before, left_s)
        left_s -= sum(p.duration_s for i in found for p in i.parts if isinstance(p, AudioPart))
        items += found
    if not items:
        raise BadInputError("There is no message to answer.")
    return "\n\n".join(instructions), tuple(items)


def _items(
    message: Message, at: str, said_before: dict[str, str], max_audio_s: float
) -> list[HistoryItem]:
    parts = _parts(message, at, max_audio_s, spoken=message.role == "user")
    if message.audio is not None:
        if message.audio.id not in said_before:
            raise BadInputError(
                f"{at}: there is no audio {message.audio.id!r} any more. Send what it said as "
                "'content'."
            )
        parts.append(TextPart(said_before[message.audio.id]))
    found = []
    if parts:
        found.append(HistoryItem(key=new_id("key"), role=message.role, parts=tuple(parts)))
    for call in message.tool_calls or ():
        found.append(call_in_words(call.function.name, call.function.arguments))
    if not found:
        raise BadInputError(f"{at} is empty.")
    return found


def _parts(
    message: Message, at: str, max_audio_s: float, *, spoken: bool
) -> list[TextPart | AudioPart]:
    content = message.content
    if content is None:
        return []
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    parts: list[TextPart | AudioPart] = []
    for part in content:
        if isinstance(part, _TextPart):
            parts.append(TextPart(part.text))
            continue
        if not spoken:
            raise BadInputError(f"{at}: a {message.role} message cannot hold audio.")
        try:
            data = binascii.a2b_base64(part.input_audio.data, strict_mode=True)
        except (binascii.Error, ValueError):
            raise BadInputError(f"{at}: input_audio.data is not base64.") from None
        audio = read_audio(data, max_s=max_audio_s)
        max_audio_s -= audio.duration_s
        parts.append(audio)
    return parts
