"""Settings of one session, and their update by session.update.

In: SessionForm. Out: a new SessionConfig, or ClientEventError and no change.
Only keys with an effect are kept and echoed: strict clients check the types of the echo, so no
value of a client is echoed unchecked.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from sglang_live.gateway.audio.codec import FORMATS, PCM, WireFormat
from sglang_live.gateway.call.settings import FrameSettings, SessionConfig, Truncation
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import check_neutral, unsupported_parameter
from sglang_live.gateway.model import check_model, is_of_openai, known_voice
from sglang_live.gateway.realtime.events import (
    AudioInputForm,
    AudioOutputForm,
    FormatForm,
    RetentionRatioForm,
    SessionForm,
    TranscriptionForm,
    voice_name,
)
from sglang_live.gateway.realtime.item_schema import check_text
from sglang_live.gateway.realtime.turn_detection import (
    KIND,
    check_keys,
    detection_json,
    frames_json,
    merge_frame_mode,
    merge_turn_detection,
)
from sglang_live.gateway.tools import check_choice, has_chosen, read_choice, read_tools
from sglang_live.gateway.transcribe import check_recognised, hints_of
from sglang_live.interaction.vad import TurnDetection
from sglang_live.kv.retention import RetentionConfig
from sglang_live.orchestrator.sessions import Orchestrator

# --- the `truncation` settings of a session: the part of a long conversation that it keeps ---


_PATH = "session.truncation"


def choose_truncation(
    form: str | RetentionRatioForm | None, server: RetentionConfig | None
) -> Truncation:
    """
    Args:
        form: None is "auto".
        server: meaning of "auto"; None: this server keeps whole conversations.
    Raises:
        ClientEventError: an unknown word, or a ratio on a server that keeps whole conversations.
    """
    match form:
        case None | "auto":
            return Truncation(retention=server)
        case "disabled":
            return Truncation(wire="disabled")
        case str():
            raise ClientEventError(
                f"Unknown truncation {form!r}: auto, disabled or a retention_ratio.", param=_PATH
            )
    if server is None:
        raise ClientEventError(
            "This server keeps whole conversations: truncation must be auto or disabled.",
            param=_PATH,
        )
    wire: dict[str, Any] = {"type": "retention_ratio", "retention_ratio": form.retention_ratio}
    limit_tokens = form.token_limits.post_instructions if form.token_limits else None
    kept = RetentionConfig()
    if limit_tokens is None:
        limit_tokens, kept = server.window_tokens + server.slack_tokens, server
    else:
        wire["token_limits"] = {"post_instructions": limit_tokens}
    # Beyond the limit, tokens are dropped until the ratio of it is left: that is the window, and
    # the slack is the rest of the limit.
    window_tokens = max(1, int(form.retention_ratio * limit_tokens))
    slack_tokens = max(1, limit_tokens - window_tokens)
    return Truncation(
        wire=wire,
        retention=replace(
            kept, sink_tokens=None, window_tokens=window_tokens, slack_tokens=slack_tokens
        ),
    )


MAX_OUTPUT_TOKENS = 4096
# Settings without an effect here, with the values that ask for nothing else than what is done.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "prompt": (),
    "reasoning": ({},),
    "tracing": ("auto", {}),
    "audio.input.noise_reduction": ({},),
    "audio.input.transcription.delay": (),
}
LOGPROBS = "item.input_audio_transcription.logprobs"
_MODALITIES = (("audio",), ("text",))


def config_json(config: SessionConfig, session_id: str) -> dict[str, Any]:
    """The settings as the protocol shows them. Strict clients refuse parallel_tool_calls."""
    frames = frames_json(config.frames) if config.frames else None
    detection = detection_json(config.turn_detection) if config.turn_detection else frames
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": config.model,
        "output_modalities": list(config.output_modalities),
        "instructions": config.instructions,
        "tools": list(config.tools),
        "tool_choice": config.tool_choice,
        "max_output_tokens": config.max_output_tokens or "inf",
        "tracing": None,
        "truncation": config.truncation.wire,
        "prompt": None,
        "include": [LOGPROBS] if config.transcript_logprobs else None,
        "expires_at": None,
        "audio": {
            "input": {
                "format": config.input_format.to_json(),
                "transcription": config.transcription,
                "noise_reduction": None,
                "turn_detection": detection,
            },
            "output": {
                "format": config.output_format.to_json(),
                "voice": config.voice,
                "speed": config.speed,
            },
        },
    }


def first_config(
    orchestrator: Orchestrator,
    gateway: GatewayConfig,
    preset: SessionForm | None = None,
    voices: tuple[str, ...] = (),
) -> SessionConfig:
    """Settings of a new session.

    Args:
        preset: those of its client secret, or None.
        voices: see GatewayParts.voices_of; (): those of the model.
    Raises:
        ClientEventError: with the path of the first faulty value.
    """
    config = SessionConfig(
        model=orchestrator.model_name,
        voice=orchestrator.voices[0] if orchestrator.voices else "default",
        voices=voices or orchestrator.voices,
        instructions=gateway.model.default_instructions,
        truncation=Truncation(retention=gateway.retention),
        turn_detection=TurnDetection(
            vad=gateway.turns.vad, ignore_other_voices=gateway.model.knows_voices
        ),
    )
    if orchestrator.duplex_s:
        frames = FrameSettings(frame_ms=round(1000 * orchestrator.duplex_s))
        config = replace(config, turn_detection=None, frames=frames)
    if preset is None:
        return config
    return update_config(config, preset, defaults=config, gateway=gateway, voice_locked=False)


def update_config(
    current: SessionConfig,
    form: SessionForm,
    *,
    defaults: SessionConfig,
    gateway: GatewayConfig,
    voice_locked: bool,
) -> SessionConfig:
    """Apply a session.update: absent keys keep their value, null ones return to the default.

    Args:
        voice_locked: the session has spoken, so its voice must stay.
    Raises:
        ClientEventError: with the path of the first faulty value.
        ModelNotFoundError: another model is named.
    """
    if form.type != "realtime":
        raise ClientEventError(
            f"This session has type 'realtime', not {form.type!r}. One for transcription is opened "
            "with ?intent=transcription, or with a client secret of that type.",
            code="unsupported_session_type",
            param="session.type",
        )
    check_model(defaults.model, form.model, "session.model", stock=True)
    changes = common_changes(form, defaults, path="session")
    changes |= resumable_change(form) | include_changes(form, gateway)
    if form.truncation is not UNSET:
        server = defaults.truncation.retention
        changes["truncation"] = choose_truncation(form.truncation, server)
    if form.audio:
        if form.audio.input:
            changes |= input_changes(form.audio.input, current, defaults, gateway)
        if form.audio.output:
            changes |= output_changes(form.audio.output, defaults, path="session.audio.output")
    check_voice(changes, current, locked=voice_locked, path="session.audio.output")
    return with_choice(replace(current, **changes), form, path="session")


def resumable_change(form: SessionForm) -> dict[str, Any]:
    return {} if form.resumable is UNSET else {"resumable": bool(form.resumable)}


def check_voice(
    changes: dict[str, Any], current: SessionConfig, *, locked: bool, path: str
) -> None:
    """Raises ClientEventError if the voice changes after the session has spoken."""
    if locked and changes.get("voice", current.voice) != current.voice:
        raise ClientEventError(
            "Cannot update a conversation's voice if assistant audio is present.",
            code="cannot_update_voice",
            param=f"{path}.voice",
        )


def with_choice(config: SessionConfig, form: Any, *, path: str) -> SessionConfig:
    """The settings without an earlier tool_choice whose function is no longer declared.

    An agent without functions that continues a session sends no tool_choice.

    Raises:
        ClientEventError: this form chooses a function that is not declared.
    """
    if form.tool_choice is UNSET and not has_chosen(config.tools, config.tool_choice):
        return replace(config, tool_choice="auto")
    check_choice(config.tools, config.tool_choice, path=f"{path}.tool_choice")
    return config


def common_changes(form: Any, defaults: SessionConfig, *, path: str) -> dict[str, Any]:
    """Changes of a SessionConfig by the keys that session.update and response.create share."""
    checks: dict[str, Callable[[Any, str], Any]] = {
        "output_modalities": _modalities,
        "instructions": _instructions,
        "tools": read_tools,
        "tool_choice": read_choice,
        "parallel_tool_calls": _as_is,
        "max_output_tokens": _max_output_tokens,
        "temperature": _as_is,
    }
    for setting, neutral in WITHOUT_EFFECT.items():
        check_neutral(_asked(form, setting), neutral, f"{path}.{setting}")
    changes: dict[str, Any] = {}
    for name, check in checks.items():
        value = getattr(form, name)
        if value is None:
            changes[name] = getattr(defaults, name)
        elif value is not UNSET:
            changes[name] = check(value, f"{path}.{name}")
    return changes


def include_changes(form: SessionForm, gateway: GatewayConfig) -> dict[str, Any]:
    """Raises ClientEventError if something is to be included that the model has not."""
    if form.include is UNSET:
        return {}
    has_logprobs = "details" in gateway.model.recogniser_gives
    for name in form.include or ():
        if name != LOGPROBS or not has_logprobs:
            raise unsupported_parameter("session.include", f"has no {cut(name)!r} for this model.")
    return {"transcript_logprobs": bool(form.include)}


def output_changes(form: AudioOutputForm, defaults: SessionConfig, *, path: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if form.format is not UNSET:
        changes["output_format"] = _format(form.format, f"{path}.format")
    if form.voice is not UNSET:
        name = voice_name(form.voice)
        known_voice(defaults.voices, name, f"{path}.voice")
        changes["voice"] = defaults.voice if name is None else name
    if form.speed is not UNSET:
        changes["speed"] = defaults.speed if form.speed is None else float(form.speed)
    return changes


def input_changes(
    form: AudioInputForm, current: SessionConfig, defaults: SessionConfig, gateway: GatewayConfig
) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if form.format is not UNSET:
        changes["input_format"] = _format(form.format, "session.audio.input.format")
    if form.transcription is not UNSET:
        changes["transcription"] = heard = _transcription(form.transcription, defaults.model)
        if heard:
            at = "session.audio.input.transcription."
            language, hint = hints_of(heard)
            check_recognised(gateway.model, at, language=language, hint=hint)
    if form.turn_detection is not UNSET and defaults.frames is not None:
        detection = form.turn_detection
        same = merge_frame_mode(detection, defaults.frames) == defaults.frames
        if detection is None or not same:
            raise ClientEventError(
                f"This model hears and speaks at the same time, in frames of "
                f"{defaults.frames.frame_ms} ms: turn_detection is of type {KIND}.",
                code="frame_mode",
                param="session.audio.input.turn_detection",
            )
    elif form.turn_detection is not UNSET:
        assert defaults.turn_detection is not None
        if form.turn_detection is not None:
            check_keys(form.turn_detection, current.frames or current.turn_detection)
        changes["frames"] = frames = merge_frame_mode(form.turn_detection, current.frames)
        changes["turn_detection"] = (
            None
            if frames
            else merge_turn_detection(
                form.turn_detection, current.turn_detection, defaults.turn_detection
            )
        )
    return changes


def _transcription(form: TranscriptionForm | None, served: str) -> dict[str, Any] | None:
    if form is None:
        return None
    # The thinker transcribes.
    check_model(served, form.model, "session.audio.input.transcription.model", stock=True)
    # Some clients fail on null, and on any model that the protocol does not name.
    model = form.model if is_of_openai(form.model) else None
    values = {
        "model": model,
        "language": form.language,
        "prompt": form.prompt,
        "keywords": form.keywords,
        "languages": form.languages,
    }
    return {name: value for name, value in values.items() if value}


def _asked(form: Any, path: str) -> Any:
    """The value at a path of a form, without its nulls; None if it is not there."""
    value = form
    for name in path.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, msgspec.Struct):
        return None if value is UNSET else value
    return {k: v for k, v in msgspec.structs.asdict(value).items() if v is not None}


def _format(form: FormatForm | None, path: str) -> WireFormat:
    if form is None:
        return PCM
    known = FORMATS.get(form.type)
    if known is None:
        raise ClientEventError(
            f"Unknown audio format {form.type!r}: {', '.join(FORMATS)}.", param=f"{path}.type"
        )
    if form.rate not in (UNSET, None, known.rate_hz):
        raise ClientEventError(f"{form.type} has {known.rate_hz} Hz here.", param=f"{path}.rate")
    return known


def _modalities(value: list[str], path: str) -> tuple[str, ...]:
    if tuple(value) not in _MODALITIES:
        raise ClientEventError(f"{path} must be ['audio'] or ['text'], got {value}.", param=path)
    return tuple(value)


def _max_output_tokens(value: int | str, path: str) -> int | None:
    if value == "inf":
        return None
    if isinstance(value, str) or not 1 <= value <= MAX_OUTPUT_TOKENS:
        raise ClientEventError(
            f"{path} must be 1 to {MAX_OUTPUT_TOKENS} or 'inf', got {value!r}.", param=path
        )
    return value


def _instructions(value: str, path: str) -> str:
    check_text(len(value), path)
    return value


def _as_is(value: Any, path: str) -> Any:
    return value
