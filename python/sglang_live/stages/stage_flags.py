"""Flags of the stages: for which stage, which setting, and of what type.

In: arguments that the server's own parser does not know, and the names of its flags. Out: settings
and engine arguments by stage. An unknown name is refused with the nearest known one.
"""

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from sglang_live.devices import read_devices
from sglang_live.errors import BadInputError
from sglang_live.policy.policies import Policies
from sglang_live.settings import flags_of
from sglang_live.stages.engine_args import engine_arguments, read_engine_argument
from sglang_live.stages.spec import STAGES
from sglang_live.stages.vocoder.config import VocoderConfig

# Of a stage, not of the engine in it: `--STAGE.replicas 2`.
STAGE_SETTINGS = ("replicas", "connect", "device")
_VOCODER_FIELDS = tuple(field.name for field in fields(VocoderConfig))
_VOCODER_SWITCHES = tuple(f.name for f in fields(VocoderConfig) if isinstance(f.default, bool))
_VOCODER_CHOICES = {one.field: one.choices for one in flags_of(VocoderConfig) if one.choices}
# Numbers that SGLang would use as they are, minutes later.
_POSITIVE = (
    "context_length",
    "max_total_tokens",
    "max_running_requests",
    "max_prefill_tokens",
    "page_size",
    "mem_fraction_static",
    "hicache_ratio",
    "tp_size",
)
# With a scale per block, into which a rotated key does not fit.
_KV_IN_BLOCKS = ("nvfp4", "fp4_mx_block16", "mxfp8")


def split_arguments(
    rest: list[str], own_flags: Iterable[str] = (), unprefixed: str = ""
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """`--a.b-c 1` -> ({"a": {"b_c": 1}}, shared). A flag without a value is True.

    Args:
        own_flags: of the program itself, with underscores, to suggest one of them.
        unprefixed: stage of flags without a prefix. "": thinker and talker.
    Raises:
        BadInputError: naming the flag.
    """
    per_stage: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    shared: dict[str, Any] = {}
    at = 0
    while at < len(rest):
        word = rest[at]
        if not word.startswith("--"):
            raise BadInputError(f"unexpected argument {word!r}")
        typed, eq, value = word.partition("=")
        at += 1
        if not eq and at < len(rest) and not rest[at].startswith("--"):
            value, eq = rest[at], "="
            at += 1
        stage, dot, argument = typed[2:].partition(".")
        if dot and stage not in STAGES:
            raise BadInputError(
                f"{typed}: no stage is called {stage!r}; there are {', '.join(STAGES)}"
            )
        if stage in STAGES and not dot:
            raise BadInputError(f"{typed}: name an argument of that stage, as {typed}.device")
        name = (argument if dot else stage).replace("-", "_")
        if not name:
            raise BadInputError(f"{word!r} names no argument")
        text = value if eq else None
        owner = stage if dot else unprefixed
        field, read = _argument(owner, typed, name, text, tuple(own_flags))
        (per_stage[stage] if dot else shared)[field] = read
    return per_stage, shared


def _argument(
    stage: str, typed: str, name: str, text: str | None, own_flags: tuple[str, ...]
) -> tuple[str, Any]:
    """The argument's field, and its value. stage: "": thinker and talker."""
    if name in STAGE_SETTINGS:
        return name, _setting(typed, name, text)
    if stage == "vocoder":
        return name, _vocoder_field(typed, name, text)
    try:
        return read_engine_argument(typed, name, text)
    except KeyError:
        known = (*engine_arguments(), *(STAGE_SETTINGS if stage else own_flags))
        raise _unknown(typed, name, known, "SGLang has no such argument") from None


def check_engine(stage: str, args: dict[str, Any], policies: Policies) -> None:
    """Raises BadInputError for arguments that the stage would refuse minutes later."""
    if stage == "vocoder":
        try:
            VocoderConfig(**args)
        except BadInputError as error:
            raise BadInputError(f"vocoder: {error}") from None
        return
    for name in _POSITIVE:
        if args.get(name) is not None and args[name] <= 0:
            raise BadInputError(f"{stage}: {_flag(name)} must be positive, got {args[name]}")
    if args.get("mem_fraction_static", 0) >= 1:
        raise BadInputError(f"{stage}: --mem-fraction-static is a share of the memory, below 1")
    if args.get("speculative_algorithm") and (stage == "talker" or policies):
        raise BadInputError(
            f"{stage}: live streams need SGLang without speculation: no --speculative-algorithm"
        )
    elif stage == "thinker" and policies.retention and args.get("kv_cache_dtype") in _KV_IN_BLOCKS:
        raise BadInputError(
            f"{stage}: endless sessions rotate keys in place, which KV in {args['kv_cache_dtype']} "
            "does not allow: --thinker.kv-cache-dtype fp8_e4m3, or --live-policies without "
            "retention"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(typed: str, name: str, text: str | None) -> Any:
    if name == "replicas":
        if text is None or not text.isdecimal() or int(text) < 1:
            raise BadInputError(f"{typed}: replicas must be a number from 1, got {text!r}")
        return int(text)
    if name == "device":
        return read_devices(typed, text)
    if text is None:
        raise BadInputError(f"{typed} needs a value")
    return text


def _vocoder_field(typed: str, name: str, text: str | None) -> int | bool | str:
    if name not in _VOCODER_FIELDS:
        known = (*_VOCODER_FIELDS, *STAGE_SETTINGS)
        raise _unknown(typed, name, known, "a vocoder has no such setting")
    if name in _VOCODER_SWITCHES:
        if text not in (None, "true", "false"):
            raise BadInputError(f"{typed} takes true or false, or no value, got {text!r}")
        return text != "false"
    if choices := _VOCODER_CHOICES.get(name):
        if text not in choices:
            raise BadInputError(f"{typed} takes {' or '.join(choices)}, got {text!r}")
        return text
    try:
        return int(text or "")
    except ValueError:
        raise BadInputError(f"{typed} takes a whole number, got {text!r}") from None


def _unknown(typed: str, name: str, known: Iterable[str], what: str) -> BadInputError:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if not near:
        begin = [other for other in known if other.startswith(name + "_")]
        near = begin if len(begin) == 1 else []
    prefix = typed[: len(typed) - len(name)]
    meant = f"; did you mean {prefix}{near[0].replace('_', '-')}?" if near else ""
    return BadInputError(f"{typed}: {what}{meant}")
