"""The body of /generate: SGLang's own form, with lists of prompts and of values per prompt."""

from typing import Any

from sglang_live.gateway.native import sampling
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    integer,
    list_of,
    text,
)
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.prompts import (
    NAME,
    CheckedBody,
    check_amount,
    count_prompts,
    ids,
    per_prompt,
    texts,
    token_lists,
)

_DEFAULT_TOKENS = 128  # SGLang's own


def _table(limits: NativeLimits) -> dict[str, Check]:
    one = fields(sampling.native(limits), nulls=True)
    media = list_of(_media, most=64)
    table: dict[str, Check] = {
        "rid": per_prompt(NAME, limits),
        "text": texts(limits),
        "input_ids": ids(limits),
        "audio_data": lambda v, at: media(v, at) if isinstance(v, list) else _media(v, at),
        "sampling_params": per_prompt(one, limits),
        "return_logprob": per_prompt(boolean, limits),
        "logprob_start_len": per_prompt(integer(-1, limits.context_tokens), limits),
        "top_logprobs_num": per_prompt(integer(0, sampling.MAX_TOP_LOGPROBS), limits),
        "token_ids_logprob": token_lists(limits),
        "return_text_in_logprobs": boolean,
        "return_prompt_token_ids": boolean,
        "stream": boolean,
        "log_metrics": boolean,
        "priority": sampling.PRIORITY,
        "session_params": fields(
            {
                "id": NAME,
                "rid": NAME,
                "offset": integer(0, limits.context_tokens),
                "drop_previous_output": boolean,
            },
            required=("id",),
        ),
    }
    if limits.takes_images:
        table["image_data"] = table["video_data"] = table["audio_data"]
    return table


def generate(body: Any, limits: NativeLimits) -> CheckedBody:
    kept = fields(_table(limits), nulls=True)(body, "")
    prompts = _prompts(kept)
    n_prompts = count_prompts(kept[prompts], prompts)
    _check_lists(kept, n_prompts)
    n_each, most = _check_sampling(kept)
    n_completions = n_prompts * n_each
    if "session_params" in kept:
        _check_session_turn(kept, n_completions)
    check_amount(n_completions, most, "sampling_params", limits)
    return CheckedBody(kept, n_completions)


def _prompts(kept: dict[str, Any]) -> str:
    """Name of the field that holds the prompts."""
    given = [name for name in ("text", "input_ids") if name in kept]
    if len(given) != 1:
        raise ParameterError("text", "give either text or input_ids.")
    media_given = [name for name in ("audio_data", "image_data", "video_data") if name in kept]
    if media_given and given == ["input_ids"]:
        # SGLang decodes the ids to find the place of the media, and fails on ids without a text.
        raise ParameterError(media_given[0], "needs its place in a text, not in input_ids.")
    is_empty = given[0] == "input_ids" and not kept["input_ids"]
    if is_empty and "session_params" not in kept:
        raise ParameterError("input_ids", "is empty.")
    return given[0]


def _check_sampling(kept: dict[str, Any]) -> tuple[int, int]:
    """Number of completions per prompt, and tokens of the longest."""
    params = kept.get("sampling_params", {})
    several = params if isinstance(params, list) else [params]
    for one_set in several:
        most = one_set.get("max_new_tokens", _DEFAULT_TOKENS)
        sampling.check_least(one_set.get("min_new_tokens"), most, "sampling_params.min_new_tokens")
        sampling.check_one_grammar(one_set, "sampling_params.")
    counts = {one_set.get("n", 1) for one_set in several}
    if len(counts) > 1:
        raise ParameterError("sampling_params.n", "must be the same for all prompts.")
    return counts.pop(), max(s.get("max_new_tokens", _DEFAULT_TOKENS) for s in several)


def _check_session_turn(kept: dict[str, Any], n_completions: int) -> None:
    if n_completions != 1 or isinstance(kept.get("text"), list):
        raise ParameterError("session_params", "takes one prompt and one completion.")
    if kept.get("logprob_start_len", -1) != -1:
        raise ParameterError(
            "logprob_start_len", "cannot be used with a session: its KV has no logprobs."
        )


def _check_lists(kept: dict[str, Any], n_prompts: int) -> None:
    """Check the lengths of per-prompt lists: SGLang reads them by index without a check."""
    prompts = kept.get("text", kept.get("input_ids"))
    is_batch = isinstance(prompts, list) and (
        "text" in kept or (bool(prompts) and isinstance(prompts[0], list))
    )
    names = ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    for name in names:
        value = kept.get(name)
        if isinstance(value, list) and not (is_batch and len(value) == n_prompts):
            raise ParameterError(name, f"must be one value, or one for each of {n_prompts}.")
        if name == "rid" and isinstance(value, list) and len(set(value)) != len(value):
            raise ParameterError(name, "contains a name twice.")
    lists = kept.get("token_ids_logprob")
    if lists and isinstance(lists[0], list) and not (is_batch and len(lists) == n_prompts):
        raise ParameterError("token_ids_logprob", f"needs one list for each of {n_prompts}.")
    if is_batch and "audio_data" in kept:
        audio = kept["audio_data"]
        if isinstance(audio, list) and len(audio) != n_prompts:
            raise ParameterError("audio_data", f"needs one entry for each of {n_prompts}.")
    params = kept.get("sampling_params")
    sets = params if isinstance(params, list) else [params or {}]
    has_n = any(one_set.get("n", 1) > 1 for one_set in sets)
    if has_n and any(isinstance(kept.get(name), list) for name in names[2:]):
        raise ParameterError("sampling_params.n", "cannot be used with values for each prompt.")


def _media(value: Any, at: str) -> Any:
    """Check one media source, or the sources of one prompt.

    MediaGuard checks their locations.
    """
    if isinstance(value, list):
        return list_of(text(2**26, least=1), most=64, least=1)(value, at)
    return text(2**26, least=1)(value, at)
