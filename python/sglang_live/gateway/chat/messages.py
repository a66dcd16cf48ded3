"""Messages of a chat: one form, and one set of rules, for spoken and written answers alike.

In: messages in OpenAI's form, also answers of this server that a client sends back.
Out: Messages with the words of each answer in place of its audio, or ClientEventError with a path.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import Ignored, Strict, missing_parameter
from sglang_live.gateway.realtime.events import Name
from sglang_live.gateway.realtime.item_schema import check_arguments, check_text
from sglang_live.gateway.tools import check_name

_MAX_MESSAGES, _MAX_PARTS, _MAX_CALLS = 4_096, 256, 128
# Fields that only one role can have.
_ROLE_OF = {
    **dict.fromkeys(("audio", "tool_calls", "refusal", "reasoning_content"), "assistant"),
    "tool_call_id": "tool",
}
_KEPT_S = 3600
_MAX_KEPT = 1000


class SpokenAnswers:
    """Words of spoken answers, which later messages name by the id of the answer's audio.

    The oldest are deleted first. Owner: one per process, for all routes that take a chat.
    """

    def __init__(self, now_s: Callable[[], float] = time.time):
        self._now_s = now_s
        self._texts: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def keep(self, audio_id: str, text: str) -> int:
        """Returns the Unix time at which the words are deleted."""
        until_s = self._now_s() + _KEPT_S
        self._texts[audio_id] = (until_s, text)
        while len(self._texts) > _MAX_KEPT:
            self._texts.popitem(last=False)
        return int(until_s)

    def text(self, audio_id: str) -> str | None:
        """None: there is no such answer, or not any more. Threads may call it."""
        until_s, text = self._texts.get(audio_id, (0.0, ""))
        return text if until_s > self._now_s() else None


class InputAudio(Strict):
    """format: accepted, no effect: the data shows its format."""

    data: str
    format: str | None = None


class MediaUrl(Strict):
    url: Annotated[str, Meta(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(Strict, tag="text"):
    text: str
    prompt_cache_breakpoint: Ignored = None


class RefusalPart(Strict, tag="refusal"):
    refusal: str


class AudioPart(Strict, tag="input_audio"):
    input_audio: InputAudio
    prompt_cache_breakpoint: Ignored = None


class AudioUrlPart(Strict, tag="audio_url"):
    """SGLang's, as video_url."""

    audio_url: MediaUrl


class ImageUrlPart(Strict, tag="image_url"):
    image_url: MediaUrl
    prompt_cache_breakpoint: Ignored = None


class VideoUrlPart(Strict, tag="video_url"):
    video_url: MediaUrl


class FramesPart(Strict, tag="video"):
    """Qwen's: a video as pictures. fps: how many of them are a second."""

    video: Annotated[list[str], Meta(min_length=1)]
    fps: Annotated[float, Meta(ge=0.1, le=10)] | None = None


UrlPart = AudioUrlPart | ImageUrlPart | VideoUrlPart
Part = TextPart | RefusalPart | AudioPart | AudioUrlPart | ImageUrlPart | VideoUrlPart | FramesPart


class CalledFunction(Strict):
    name: str
    arguments: str | None = None


class ToolCallForm(Strict):
    """index: accepted, no effect: of the chunks of an answer that a client puts together."""

    function: CalledFunction
    id: Name | None = None
    index: int | None = None
    type: Literal["function"] | None = None


class AudioRef(Strict):
    """data, expires_at, transcript: of an answer that a client sends again; no effect."""

    id: str
    data: Ignored = None
    expires_at: Ignored = None
    transcript: Ignored = None


class Message(Strict):
    """
    name: accepted, no effect.
    reasoning_content: a spoken answer does not follow from it.
    function_call, annotations: of an answer that a client sends again; no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(max_length=_MAX_PARTS)] | None = None
    audio: AudioRef | None = None
    tool_calls: Annotated[list[ToolCallForm], Meta(max_length=_MAX_CALLS)] | None = None
    tool_call_id: Name | None = None
    name: Name | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    function_call: None = None
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        """All texts of the content."""
        if isinstance(self.content, str):
            return self.content
        return "".join(p.text for p in self.content or () if isinstance(p, TextPart))

    @property
    def parts(self) -> list[Part]:
        if isinstance(self.content, str):
            return [TextPart(self.content)]
        return self.content or []


Messages = Annotated[list[Message], Meta(min_length=1, max_length=_MAX_MESSAGES)]


def read_messages(
    messages: list[Message], answers: SpokenAnswers, takes: tuple[type, ...] = ()
) -> list[Message]:
    """Check the messages and what they have in common.

    Args:
        takes: kinds of UrlPart, and FramesPart, that the route takes.
    Returns:
        The same, without `audio` and `refusal`, which become parts of the content.
    Raises:
        ClientEventError: content that a role cannot have, no content, audio of an unknown answer,
            an output without a function call or a second one, or too much text.
    """
    unanswered = Counter[str]()
    read = []
    for n, message in enumerate(messages):
        at = f"messages[{n}]"
        _check_role(message, at)
        _check_parts(message, takes, f"{at}.content")
        for k, call in enumerate(message.tool_calls or ()):
            check_name(call.function.name, f"{at}.tool_calls[{k}].function.name")
            arguments = call.function.arguments
            check_arguments(arguments or "", f"{at}.tool_calls[{k}].function.arguments")
            unanswered[call.id or ""] += 1
        if message.role == "tool":
            _check_output(message.tool_call_id, unanswered, f"{at}.tool_call_id")
        read.append(_in_words(message, answers, at))
        _check_content(read[-1], at)
    check_text(sum(map(_n_characters, read)), "messages")
    return read


def _check_role(message: Message, at: str) -> None:
    for name, role in _ROLE_OF.items():
        if getattr(message, name) is not None and message.role != role:
            raise ClientEventError(
                f"{at}: a {message.role} message cannot have {name}.", param=f"{at}.{name}"
            )


def _check_parts(message: Message, takes: tuple[type, ...], at: str) -> None:
    for n, part in enumerate(message.parts):
        if isinstance(part, TextPart):
            continue
        kind = part.__struct_config__.tag
        if isinstance(part, UrlPart | FramesPart) and not isinstance(part, takes):
            raise ClientEventError(
                f"{at}[{n}]: {kind} is not supported here.",
                code="unsupported_content_type",
                param=f"{at}[{n}].type",
            )
        if message.role != ("assistant" if isinstance(part, RefusalPart) else "user"):
            what = "a refusal" if isinstance(part, RefusalPart) else "audio, pictures or videos"
            raise ClientEventError(
                f"{at}[{n}]: a {message.role} message cannot hold {what}.",
                param=f"{at}[{n}].type",
            )


def _check_output(call_id: str | None, unanswered: Counter[str], at: str) -> None:
    if call_id is None:
        raise missing_parameter(at)
    if not unanswered[call_id]:
        has_output = call_id in unanswered
        what = "already has an output" if has_output else "not found in the messages before"
        raise ClientEventError(
            f"Tool call ID {cut(call_id)!r} {what}.", code="invalid_tool_call_id", param=at
        )
    unanswered[call_id] -= 1


def _in_words(message: Message, answers: SpokenAnswers, at: str) -> Message:
    """The message whose refusals, and the words of its audio, are texts."""
    said = [message.refusal] if message.refusal else []
    if message.audio is not None:
        words = answers.text(message.audio.id)
        if words is None:
            raise ClientEventError(
                f"{at}: there is no audio {cut(message.audio.id)!r}, or not any more. Send its "
                "transcript as 'content'.",
                param=f"{at}.audio.id",
            )
        said.append(words)
    # A client may send the words beside the audio that says them.
    more = [TextPart(text) for text in said if text != message.text]
    content: str | list[Part]
    if isinstance(message.content, list):
        content = [TextPart(p.refusal) if isinstance(p, RefusalPart) else p for p in message.parts]
        content += more
    elif message.content and more:
        content = [TextPart(message.content), *more]
    else:
        content = message.content or "".join(said)
    return msgspec.structs.replace(message, content=content, audio=None, refusal=None)


def _check_content(message: Message, at: str) -> None:
    """A function may return nothing, and an answer may be empty; the others say something."""
    if message.role == "user" and not any(
        not isinstance(part, TextPart) or part.text for part in message.parts
    ):
        raise ClientEventError(f"{at} is empty.", param=f"{at}.content")


def _n_characters(message: Message) -> int:
    calls = message.tool_calls or ()
    return (
        len(message.text)
        + len(message.reasoning_content or "")
        + sum(len(call.function.arguments or "") for call in calls)
    )


# --- the form that SGLang gets ---


def as_sglang(message: Message) -> dict[str, Any]:
    content = message.content
    calls = [
        {"id": call.id, "type": "function", "function": _called(call.function)}
        for call in message.tool_calls or ()
    ]
    fields = {
        "role": message.role,
        "content": content if isinstance(content, str) else list(map(_part, message.parts)),
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": calls or None,
        "reasoning_content": message.reasoning_content,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _called(function: CalledFunction) -> dict[str, str]:
    # SGLang takes nothing but an object.
    is_none = function.arguments in (None, "", "null")
    return {"name": function.name, "arguments": "{}" if is_none else function.arguments or ""}


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart():
            return {"type": "text", "text": part.text}
        case AudioPart():
            # SGLang has names for two formats, and reads the data.
            audio = {"data": part.input_audio.data, "format": "wav"}
            return {"type": "input_audio", "input_audio": audio}
        case _:
            kind = str(part.__struct_config__.tag)
            url: MediaUrl = getattr(part, kind)
            detail = {"detail": url.detail} if url.detail else {}
            return {"type": kind, kind: {"url": url.url, **detail}}
