"""Prompts of a body: their form, their number, and how many completions and tokens they request.

In: JSON as it was sent. Out: the same, or ParameterError.
"""

from dataclasses import dataclass
from typing import Any

from sglang_live.gateway.native import sampling
from sglang_live.gateway.native.checks import Check, ParameterError, list_of, one_or_list, text
from sglang_live.gateway.native.limits import NativeLimits

NAME = text(512, least=1)


@dataclass(frozen=True, slots=True)
class CheckedBody:
    """A body of which every field was checked.

    n_completions: prompts times n; 0 if the route generates nothing.
    """

    body: dict[str, Any]
    n_completions: int = 0


def ids(limits: NativeLimits) -> Check:
    """Check of one list of ids, or of a list of such lists."""
    one = list_of(sampling.token_id(limits), most=limits.context_tokens)
    several = list_of(one, most=limits.max_completions, least=1)

    def check(value: Any, at: str) -> list[Any]:
        is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        return several(value, at) if is_batch else one(value, at)

    return check


def texts(limits: NativeLimits) -> Check:
    one_text = text(limits.max_text_chars)
    check_each = one_or_list(one_text, most=limits.max_completions)

    def check(value: Any, at: str) -> Any:
        found = check_each(value, at)
        if isinstance(found, list) and (not found or sum(map(len, found)) > limits.max_text_chars):
            raise ParameterError(at, f"must have 1 to {limits.max_text_chars} characters in all.")
        return found

    return check


def per_prompt(item: Check, limits: NativeLimits) -> Check:
    return one_or_list(item, most=limits.max_completions)


def token_lists(limits: NativeLimits) -> Check:
    one = list_of(sampling.token_id(limits), most=128)
    several = list_of(one, most=limits.max_completions)

    def check(value: Any, at: str) -> list[Any]:
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


def check_amount(n_completions: int, most: int, at: str, limits: NativeLimits) -> None:
    if n_completions > limits.max_completions:
        raise ParameterError(
            at, f"requests {n_completions} completions: at most {limits.max_completions}."
        )
    if n_completions * most > limits.max_new_tokens:
        raise ParameterError(
            at, f"requests {n_completions} times {most} tokens: at most {limits.max_new_tokens}."
        )
