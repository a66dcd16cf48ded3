"""Sampling parameters that may reach an engine, with their types and bounds."""

from typing import Any

from sglang_live.gateway.flex.tier import TIERS
from sglang_live.gateway.native import grammars, patterns
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    integer,
    list_of,
    number,
    one_of,
    one_or_list,
    text,
)
from sglang_live.gateway.native.limits import NativeLimits

# OpenAI's limit. SGLang sorts this number of candidates for every token.
MAX_TOP_LOGPROBS = 20
_SEED = integer(-(2**63), 2**63 - 1)
# SGLang's field; below 0 the request is flex. Nothing goes before the requests of others.
PRIORITY = integer(-(2**31), 0)
_STOPS, _STOP_CHARS, _STOP_IDS, _BIASES = 32, 1_024, 64, 1_024


def token_id(limits: NativeLimits) -> Check:
    return integer(0, limits.vocab_size - 1)


def shared(limits: NativeLimits) -> dict[str, Check]:
    """Fields that /generate's sampling_params and OpenAI's bodies have in common."""
    return {
        "n": integer(1, limits.max_completions),
        "stop": one_or_list(text(_STOP_CHARS, least=1), most=_STOPS),
        "stop_token_ids": list_of(token_id(limits), most=_STOP_IDS),
        "stop_regex": one_or_list(patterns.stop_regex, most=4),
        "temperature": number(0, 100),
        "top_p": number(1e-6, 1),
        "top_k": _top_k,
        "min_p": number(0, 1),
        "frequency_penalty": number(-2, 2),
        "presence_penalty": number(-2, 2),
        "repetition_penalty": number(0.01, 2),  # smaller ones divide by zero in half precision
        "regex": patterns.regex,
        "ebnf": grammars.ebnf,
        "ignore_eos": boolean,
        "skip_special_tokens": boolean,
        "no_stop_trim": boolean,
        "logit_bias": _bias(limits),
    }


def native(limits: NativeLimits) -> dict[str, Check]:
    return shared(limits) | {
        "max_new_tokens": integer(0, limits.context_tokens),
        "min_new_tokens": integer(0, limits.context_tokens),
        "json_schema": grammars.json_schema,
        "structural_tag": grammars.structural_tag,
        "spaces_between_special_tokens": boolean,
        "stream_interval": integer(1, 1_024),
        "sampling_seed": _SEED,
        "beam_width": one_of(1),
    }


def openai(limits: NativeLimits) -> dict[str, Check]:
    return shared(limits) | {
        "min_tokens": integer(0, limits.context_tokens),
        "max_tokens": integer(1, limits.context_tokens),
        "seed": _SEED,
        "service_tier": one_of(*TIERS),
        "priority": PRIORITY,
    }


def check_least(least: Any, most: Any, at: str) -> None:
    if least is not None and most is not None and least > most:
        raise ParameterError(at, f"is more than {most}, the most tokens of a completion.")


def check_one_grammar(body: dict[str, Any], at: str) -> None:
    names = ("json_schema", "regex", "ebnf", "structural_tag", "response_format")
    given = [name for name in names if body.get(name)]
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


def _top_k(value: Any, at: str) -> int:
    return value if value == -1 and type(value) is int else integer(1, 2**30)(value, at)


def _bias(limits: NativeLimits) -> Check:
    bias = number(-100, 100)

    def check(value: Any, at: str) -> dict[str, float]:
        if not isinstance(value, dict) or len(value) > _BIASES:
            raise ParameterError(at, f"must be an object of at most {_BIASES} tokens.")
        for name, amount in value.items():
            place = f"{at}.{name}"
            is_number = name.isascii() and name.isdigit() and len(name) < 10
            if not is_number or int(name) >= limits.vocab_size:
                raise ParameterError(place, "is no id of the vocabulary.")
            bias(amount, place)
        return value

    return check
