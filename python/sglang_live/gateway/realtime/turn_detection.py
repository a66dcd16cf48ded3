"""The `turn_detection` settings of a session: how the end of a user's turn is detected.

In: TurnDetectionForm and the current settings. Out: TurnDetection, or ClientEventError.
"""

from dataclasses import replace
from typing import Any

from msgspec import UNSET

from sglang_live.gateway.call.settings import FrameSettings
from sglang_live.gateway.errors import ClientEventError
from sglang_live.gateway.realtime.events import TurnDetectionForm
from sglang_live.interaction.vad import DetectionKind, TurnDetection, VadSettings

# --- settings of frame mode: audio in frames of fixed length, without turns ---
# It is the `turn_detection` type "frames". In: TurnDetectionForm. Out: FrameSettings.


KIND = "frames"


def frames_json(frames: FrameSettings) -> dict[str, Any]:
    return {"type": KIND, "frame_ms": frames.frame_ms, "max_tokens": frames.max_tokens}


def merge_frame_mode(
    form: TurnDetectionForm | None, current: FrameSettings | None
) -> FrameSettings | None:
    """Apply a form: absent keys keep their value, null ones return to the default.

    Returns:
        None if the form sets another turn detection.
    """
    if form is None or (form.type in (UNSET, None) and current is None):
        return None
    if form.type not in (UNSET, None, KIND):
        return None
    current, default = current or FrameSettings(), FrameSettings()
    values: dict[str, int] = {}
    for name in ("frame_ms", "max_tokens"):
        sent = getattr(form, name)
        kept = getattr(current, name) if sent is UNSET else sent
        values[name] = getattr(default, name) if kept is None else kept
    return FrameSettings(**values)


_KINDS: dict[str, DetectionKind] = {"server_vad": "server_vad", "semantic_vad": "semantic_vad"}

# semantic_vad has an eagerness in place of a duration. Without a model that judges whether a turn
# is complete (gateway/call/turns/pause_judge.py), these silences end turns.
_SILENCE_MS_BY_EAGERNESS = {"low": 1200, "medium": 700, "auto": 700, "high": 400}
_FLAGS = ("create_response", "interrupt_response")
_SERVER_VAD_NUMBERS = ("threshold", "prefix_padding_ms", "silence_duration_ms")
# Not in the protocol.
_OF_SPEAKER = ("ignore_other_voices", "ignore_other_turns")
_IGNORED = ("ignore_echo", "ignore_backchannels", "ignore_side_talk", *_OF_SPEAKER)
_EXTENSIONS = ("confirm_ms", *_IGNORED)
_OF_BOTH = (*_FLAGS, *_EXTENSIONS, "model_version")
_KEYS_OF = {
    "server_vad": (*_SERVER_VAD_NUMBERS, "idle_timeout_ms", *_OF_BOTH),
    "semantic_vad": ("eagerness", *_OF_BOTH),
    KIND: ("frame_ms", "max_tokens"),
}
_PATH = "session.audio.input.turn_detection"


def detection_json(detection: TurnDetection) -> dict[str, Any]:
    """As the protocol has it."""
    flags = {name: getattr(detection, name) for name in _FLAGS}
    extensions = {"confirm_ms": detection.vad.confirm_ms}
    extensions |= {name: getattr(detection, name) for name in _IGNORED}
    flags |= {name: extensions[name] for name in detection.shown}
    kind = detection.kind
    if kind == "semantic_vad":
        return {"type": kind, "eagerness": detection.eagerness, **flags}
    numbers = {name: getattr(detection.vad, name) for name in _SERVER_VAD_NUMBERS}
    return {"type": kind, **numbers, "idle_timeout_ms": detection.idle_timeout_ms, **flags}


def check_keys(form: TurnDetectionForm, current: TurnDetection | FrameSettings | None) -> None:
    """Raises ClientEventError if a key with a value is not one of this kind of detection."""
    kind = form.type or (KIND if isinstance(current, FrameSettings) else _kind(form, current))
    for name in form.__struct_fields__:
        if name == "type" or getattr(form, name) in (UNSET, None):
            continue
        if name not in _KEYS_OF.get(kind, (name,)):
            raise ClientEventError(
                f"{kind} has no {name}.", code="unknown_parameter", param=f"{_PATH}.{name}"
            )


def merge_turn_detection(
    form: TurnDetectionForm | None, current: TurnDetection | None, defaults: TurnDetection
) -> TurnDetection | None:
    """Apply a form: absent keys keep their value, null ones return to the default.

    Raises:
        ClientEventError: unknown type or eagerness, or a setting that takes a speaker model.
    """
    if form is None:
        return None
    for name in _OF_SPEAKER:
        if getattr(form, name) is True and not defaults.ignore_other_voices:
            raise ClientEventError(
                f"This server has no speaker model, which {name} takes.",
                code="no_speaker_model",
                param=f"{_PATH}.{name}",
            )
    default = replace(defaults, kind=_kind(form, current))
    # Settings of one kind have no meaning for the other.
    base = current if current and current.kind == default.kind else default
    changes = {
        name: _pick(getattr(form, name), getattr(base, name), getattr(default, name))
        for name in (*_FLAGS, *_IGNORED, "idle_timeout_ms", "eagerness")
    }
    if changes["eagerness"] not in _SILENCE_MS_BY_EAGERNESS:
        raise ClientEventError(
            f"Unknown eagerness {changes['eagerness']!r}: low, medium, high or auto.",
            param=f"{_PATH}.eagerness",
        )
    if default.kind == "semantic_vad":
        changes["idle_timeout_ms"] = None  # the protocol has it for server_vad only
    changes["shown"] = tuple(
        name for name in _EXTENSIONS if name in base.shown or getattr(form, name) is not UNSET
    )
    return replace(base, vad=_vad_settings(form, base, default, changes["eagerness"]), **changes)


def _kind(form: TurnDetectionForm, current: TurnDetection | None) -> DetectionKind:
    if form.type is UNSET or form.type is None:
        return current.kind if current else "server_vad"
    kind = _KINDS.get(form.type)
    if kind is None:
        raise ClientEventError(
            f"Unknown turn detection {form.type!r}: server_vad, semantic_vad, frames or null.",
            param=f"{_PATH}.type",
        )
    return kind


def _vad_settings(
    form: TurnDetectionForm, base: TurnDetection, default: TurnDetection, eagerness: str
) -> VadSettings:
    confirm_ms = _pick(form.confirm_ms, base.vad.confirm_ms, default.vad.confirm_ms)
    if base.kind == "semantic_vad":
        silence_ms = _SILENCE_MS_BY_EAGERNESS[eagerness]
        return replace(default.vad, silence_duration_ms=silence_ms, confirm_ms=confirm_ms)
    numbers = {
        name: _pick(getattr(form, name), getattr(base.vad, name), getattr(default.vad, name))
        for name in _SERVER_VAD_NUMBERS
    }
    return replace(base.vad, confirm_ms=confirm_ms, **numbers)


def _pick(sent: Any, current: Any, default: Any) -> Any:
    if sent is UNSET:
        return current
    return default if sent is None else sent
