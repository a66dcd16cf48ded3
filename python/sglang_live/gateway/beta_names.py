"""Names of the protocol's beta, and what its general release calls the same thing.

In: a name that a client used. Out: the name it should use. Nothing is translated: a client of the
beta would not understand the events that it gets.
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
# Of the parts of an item, by the role of its message.
_PARTS = {
    ("assistant", "text"): "output_text",
    ("assistant", "audio"): "output_audio",
    ("user", "text"): "input_text",
    ("user", "audio"): "input_audio",
    ("system", "text"): "input_text",
}


def ga_name(path: str) -> str | None:
    """The path that the general release has for a setting of the beta; None: it was never one."""
    numbers = iter(_INDEX.findall(path))
    known = _PATHS.get(_INDEX.sub("[]", path))
    return known and re.sub(r"\[\]", lambda _: next(numbers), known)


def ga_event(kind: str) -> str | None:
    return _EVENTS.get(kind)


def ga_part(role: str, kind: str) -> str | None:
    return _PARTS.get((role, kind))
