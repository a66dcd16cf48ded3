"""Names of the protocol's beta, and their names in its general release.

In: a name that a client used. Out: the name to use instead, for error messages. No event is
translated: a client of the beta could not read the events that it gets.
"""

import re

_INDEX = re.compile(r"\[\d+\]")

_COMMON = {
    "modalities": "output_modalities",
    "voice": "audio.output.voice",
    "output_audio_format": "audio.output.format",
    "max_response_output_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "tools[].function": "tools[].name",
    "tool_choice.function": "tool_choice.name",
}
_SESSION = {
    "input_audio_format": "audio.input.format",
    "input_audio_transcription": "audio.input.transcription",
    "input_audio_noise_reduction": "audio.input.noise_reduction",
    "turn_detection": "audio.input.turn_detection",
    "speed": "audio.output.speed",
    "audio.turn_detection": "audio.input.turn_detection",
    "audio.voice": "audio.output.voice",
    "audio.transcription": "audio.input.transcription",
    "audio.output.turn_detection": "audio.input.turn_detection",
    "audio.input.voice": "audio.output.voice",
}
_PATHS = {
    **{f"session.{beta}": f"session.{ga}" for beta, ga in (_COMMON | _SESSION).items()},
    **{f"response.{beta}": f"response.{ga}" for beta, ga in _COMMON.items()},
}
_EVENTS = {
    "transcription_session.update": "session.update",
    "session.create": "session.update",
}
# Types of content parts, by the role of their message.
_PARTS = {
    ("assistant", "text"): "output_text",
    ("assistant", "audio"): "output_audio",
    ("user", "text"): "input_text",
    ("user", "audio"): "input_audio",
    ("system", "text"): "input_text",
}


def ga_name(path: str) -> str | None:
    """The general release's path of a setting of the beta, or None if the beta has no such path."""
    numbers = iter(_INDEX.findall(path))
    known = _PATHS.get(_INDEX.sub("[]", path))
    return known and re.sub(r"\[\]", lambda _: next(numbers), known)


def ga_event(kind: str) -> str | None:
    return _EVENTS.get(kind)


def ga_part(role: str, kind: str) -> str | None:
    return _PARTS.get((role, kind))
