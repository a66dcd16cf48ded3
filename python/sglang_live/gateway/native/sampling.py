"""Sampling parameters that may reach an engine: their forms, and checks of the whole."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.json_forms import (
    Ignored,
    ServiceTier,
    Strict,
    check_neutral,
    read_value,
)
from sglang_live.gateway.native import grammars
from sglang_live.gateway.native.limits import NativeLimits

# OpenAI's limit. SGLang sorts this number of candidates for every token.
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
# SGLang's field; below 0 the request is flex. Nothing goes before the requests of others.
Priority = Annotated[int, Meta(ge=-(2**31), le=0)]
Name = Annotated[str, Meta(max_length=512)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Id = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[int, Meta(ge=1)]
_Stop = Annotated[str, Meta(min_length=1, max_length=1_024)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_BIASES, _MOST_BIAS = 1_024, 100
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "response_format")
# Settings without an effect on any completion, with the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": (),
    "functions": ([],),
    "moderation": (),
    "prediction": (),
    "store": (False,),
    "suffix": ("",),
    "use_audio_in_video": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Fields of OpenAI's clients that change no completion.
IGNORED = (
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", "user"),
)


class Sampling(Strict, kw_only=True, omit_defaults=True):
    """Fields that /generate's sampling_params and OpenAI's bodies have in common."""

    n: Amount | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=32)] | None = None
    stop_token_ids: Annotated[list[Id], Meta(max_length=64)] | None = None
    stop_regex: str | Annotated[list[str], Meta(max_length=4)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**30)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    # Smaller ones divide by zero in half precision.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=_BIASES)] | None = None

    def check(self, limits: NativeLimits, at: str = "") -> None:
        """Raises ParameterError. at: path of these fields, with a dot at its end."""
        if self.n is not None and self.n > limits.max_completions:
            raise ParameterError(f"{at}n", f"must be at most {limits.max_completions}.")
        if self.top_k == 0:
            raise ParameterError(f"{at}top_k", "must be -1, or at least 1.")
        limits.check_ids(self.stop_token_ids or [], f"{at}stop_token_ids")
        for name, amount in (self.logit_bias or {}).items():
            self._check_bias(name, amount, f"{at}logit_bias.{name}", limits)
        for name, check in grammars.CHECKS.items():
            value = getattr(self, name, None)
            for n, one in enumerate(value if isinstance(value, list) else ()):
                check(one, f"{at}{name}[{n}]")
            if isinstance(value, str):
                check(value, f"{at}{name}")

    def _check_bias(self, name: str, amount: Any, at: str, limits: NativeLimits) -> None:
        is_number = name.isascii() and name.isdigit() and len(name) < 10
        if not is_number or int(name) >= limits.vocab_size:
            raise ParameterError(at, "is no id of the vocabulary.")
        is_kind = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not is_kind or abs(amount) > _MOST_BIAS:
            message = f"must be a number from -{_MOST_BIAS} to {_MOST_BIAS}."
            raise ParameterError(at, message, is_kind=is_kind)


class StreamOptions(Strict, omit_defaults=True):
    """include_obfuscation: accepted, no effect (padding that hides the length of the text)."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Strict, omit_defaults=True):
    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: Annotated[str, Meta(max_length=4_096)] | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A body of which every field was checked.

    n_completions: prompts times n; 0 if the route generates nothing.
    """

    body: dict[str, Any]
    n_completions: int = 0


class OpenaiForm(Sampling, kw_only=True):
    """Fields that /v1/completions and /v1/chat/completions have in common.

    metadata to user: accepted, no effect.
    function_call and the fields after it: only the values in NEUTRAL are accepted.
    """

    model: Name | None = None
    min_tokens: Count | None = None
    max_tokens: Amount | None = None
    seed: Seed | None = None
    service_tier: ServiceTier | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    user: Ignored = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    store: Any = None
    suffix: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def to_sglang(self, limits: NativeLimits) -> dict[str, Any]:
        """The checked fields that SGLang gets."""
        self.check(limits)
        limits.check_tokens(self.min_tokens, "min_tokens")
        limits.check_tokens(self.max_tokens, "max_tokens")
        body: dict[str, Any] = msgspec.to_builtins(self)
        for name in IGNORED:
            body.pop(name, None)
        for name, values in NEUTRAL.items():
            check_neutral(body.pop(name, None), values, name)
        body.get("stream_options", {}).pop("include_obfuscation", None)
        if self.response_format is not None:
            body["response_format"] = _response_format(self.response_format, "response_format")
        return body

    def counted(
        self, body: dict[str, Any], limits: NativeLimits, *, most: int, n_prompts: int = 1
    ) -> CheckedBody:
        """Check what is sent as a whole. most: tokens of a completion; 0: as many as fit."""
        check_least(self.min_tokens, most or limits.context_tokens, "min_tokens")
        check_one_grammar(body)
        n_completions = n_prompts * (self.n or 1)
        limits.check_amount(n_completions, most, "n")
        return CheckedBody(body, n_completions)


def _response_format(value: Any, at: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "structural_tag":
        grammars.check_bounds(value, at)
        return dict(value)
    if kind != "json_schema":
        raise ParameterError(f"{at}.type", "must be text, json_object or json_schema.")
    inner_at = f"{at}.json_schema"
    inner = read_value(value.get("json_schema"), JsonSchemaFormat, inner_at)
    grammars.schema(inner.schema, f"{inner_at}.schema")
    return {"type": kind, "json_schema": {"name": "schema", **msgspec.to_builtins(inner)}}


def check_least(least: int | None, most: int, at: str) -> None:
    if least is not None and least > most:
        raise ParameterError(at, f"is more than {most}, the most tokens of a completion.")


def check_one_grammar(body: dict[str, Any], at: str = "") -> None:
    given = [name for name in _GRAMMARS if body.get(name)]
    if len(given) > 1:
        raise ParameterError(at + given[1], f"cannot be used together with {given[0]}.")
    chosen = body.get("tool_choice", "auto")
    has_grammar = bool(given) or chosen not in ("auto", "none")
    has_grammar |= any(tool["function"].get("strict") for tool in body.get("tools", ()))
    for name in ("min_tokens", "min_new_tokens"):
        if has_grammar and body.get(name):
            # Where the grammar allows only its end and the minimum forbids the end, no token is
            # left to sample, and SGLang's sampler stops the engine.
            raise ParameterError(at + name, "cannot be used together with a grammar.")
