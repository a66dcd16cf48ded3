"""Prompts of a body: their form, how many there are, and how many answers and tokens they ask.

In: JSON as it was sent. Out: the same, or ParameterError.
"""

from dataclasses import dataclass
from typing import Any

from sglang_live.gateway.native import sampling
from sglang_live.gateway.native.checks import Check, ParameterError, list_of, one_or_list, text
from sglang_live.gateway.native.limits import NativeLimits

NAME = text(512, least=1)


@dataclass(frozen=True, slots=True)
class Asked:
    """n_answers: prompts times n; 0 where no model answers."""

    body: dict[str, Any]
    n_answers: int = 0


def ids(limits: NativeLimits) -> Check:
    """One list of ids, or a list of such lists."""
    one = list_of(sampling.token_id(limits), most=limits.context_tokens)
    several = list_of(one, most=limits.max_answers, least=1)

    def check(value: Any, at: str) -> list:
        is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        return several(value, at) if is_batch else one(value, at)

    return check


def texts(limits: NativeLimits) -> Check:
    one_text = text(limits.max_text_chars)
    check_each = one_or_list(one_text, most=limits.max_answers)

    def check(value: Any, at: str) -> Any:
        found = check_each(value, at)
        if isinstance(found, list) and (not found or sum(map(len, found)) > limits.max_text_chars):
            raise ParameterError(at, f"must have 1 to {limits.max_text_chars} characters in all.")
        return found

    return check


def per_answer(item: Check, limits: NativeLimits) -> Check:
    return one_or_list(item, most=limits.max_answers)


def token_lists(limits: NativeLimits) -> Check:
    one = list_of(sampling.token_id(limits), most=128)
    several = list_of(one, most=limits.max_answers)

    def check(value: Any, at: str) -> list:
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        return several(value, at) if nested else one(value, at)

    return check


def count_prompts(prompts: Any, at: str) -> int:
    if isinstance(prompts, str):
        if not prompts:
            raise ParameterError(at, "is empty.")
        return 1
    if prompts and not isinstance(prompts[0], int):
        if any(not prompt for prompt in prompts):
            raise ParameterError(at, "has an empty prompt.")
        return len(prompts)
    return 1


def check_amount(n_answers: int, most: int, at: str, limits: NativeLimits) -> None:
    if n_answers > limits.max_answers:
        raise ParameterError(at, f"asks for {n_answers} answers: at most {limits.max_answers}.")
    if n_answers * most > limits.max_new_tokens:
        raise ParameterError(
            at, f"asks for {n_answers} times {most} tokens: at most {limits.max_new_tokens}."
        )
