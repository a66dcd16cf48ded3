"""The body of each proxied route: which fields pass, in what form, and how many answers it asks.

In: JSON as it was sent. Out: Asked, whose body is exactly what was checked, or ParameterError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_live.gateway.native import grammars, sampling
from sglang_live.gateway.native.chat import chat_fields, check_continued
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    integer,
    list_of,
    number,
    one_or_list,
    text,
)
from sglang_live.gateway.native.limits import NativeLimits

_NAME = text(512, least=1)
_SESSION_S = number(1, 86_400)


@dataclass(frozen=True, slots=True)
class Asked:
    """n_answers: prompts times n; 0 where no model answers."""

    body: dict[str, Any]
    n_answers: int = 0


Form = Callable[[Any], Asked]


def forms(limits: NativeLimits) -> dict[str, Form]:
    return {
        "/generate": lambda body: _generate(body, limits),
        "/v1/completions": lambda body: _completion(body, limits),
        "/v1/chat/completions": lambda body: _chat(body, limits),
        "/v1/tokenize": lambda body: _tokenize(body, limits),
        "/v1/detokenize": lambda body: _plain(body, {"tokens": _ids(limits)}, ("tokens",)),
        "/open_session": _open_session,
        "/close_session": lambda body: _only(body, {"session_id": _NAME}, ("session_id",)),
        "/abort_request": lambda body: _only(body, {"rid": _NAME, "abort_all": _never}, ("rid",)),
    }


def _only(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> Asked:
    return Asked(fields(table, required=required)(body, ""))


def _plain(body: Any, table: dict[str, Check], required: tuple[str, ...] = ()) -> Asked:
    more = {"model": text(512), "skip_special_tokens": boolean}
    return _only(body, table | more, required)


def _never(value: Any, at: str) -> Any:
    if value is not False:
        raise ParameterError(at, "would end the answers of other clients: name a rid.")
    return None


def _open_session(body: Any) -> Asked:
    table: dict[str, Check] = {
        "capacity_of_str_len": integer(1, 2**31 - 1),
        "session_id": _NAME,
        "streaming": boolean,
        "timeout": _SESSION_S,
    }
    # `retention` is the gateway's own and was taken out.
    return _only(body, table, ("capacity_of_str_len",))


def _ids(limits: NativeLimits) -> Check:
    """One list of ids, or a list of such lists."""
    one = list_of(sampling.token_id(limits), most=limits.context_tokens)
    several = list_of(one, most=limits.max_answers, least=1)

    def check(value: Any, at: str) -> list:
        is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        return several(value, at) if is_batch else one(value, at)

    return check


def _texts(limits: NativeLimits) -> Check:
    one_text = text(limits.max_text_chars)
    check_each = one_or_list(one_text, most=limits.max_answers)

    def check(value: Any, at: str) -> Any:
        found = check_each(value, at)
        if isinstance(found, list) and (not found or sum(map(len, found)) > limits.max_text_chars):
            raise ParameterError(at, f"must have 1 to {limits.max_text_chars} characters in all.")
        return found

    return check


def _per_answer(item: Check, limits: NativeLimits) -> Check:
    return one_or_list(item, most=limits.max_answers)


# --- /generate ---


def _generate(body: Any, limits: NativeLimits) -> Asked:
    one = fields(sampling.native(limits))
    media = list_of(_media, most=64)
    table: dict[str, Check] = {
        "rid": _per_answer(_NAME, limits),
        "text": _texts(limits),
        "input_ids": _ids(limits),
        "audio_data": lambda v, at: media(v, at) if isinstance(v, list) else _media(v, at),
        "sampling_params": _per_answer(one, limits),
        "return_logprob": _per_answer(boolean, limits),
        "logprob_start_len": _per_answer(integer(-1, limits.context_tokens), limits),
        "top_logprobs_num": _per_answer(integer(0, sampling.MAX_TOP_LOGPROBS), limits),
        "token_ids_logprob": _token_lists(limits),
        "return_text_in_logprobs": boolean,
        "return_prompt_token_ids": boolean,
        "stream": boolean,
        "log_metrics": boolean,
        "session_params": fields(
            {
                "id": _NAME,
                "rid": _NAME,
                "offset": integer(0, limits.context_tokens),
                "drop_previous_output": boolean,
            },
            required=("id",),
        ),
    }
    if limits.sees:
        table["image_data"] = table["video_data"] = table["audio_data"]
    kept = fields(table)(body, "")
    given = [name for name in ("text", "input_ids") if name in kept]
    if len(given) != 1:
        raise ParameterError("text", "give either text or input_ids.")
    media_given = [name for name in ("audio_data", "image_data", "video_data") if name in kept]
    if media_given and given == ["input_ids"]:
        # SGLang decodes the ids to find the places; ids without a text then fail inside of it.
        raise ParameterError(media_given[0], "needs its place in a text, not in input_ids.")
    n_prompts = _n_prompts(kept[given[0]], given[0])
    _check_lists(kept, n_prompts)
    params = kept.get("sampling_params", {})
    several = params if isinstance(params, list) else [params]
    for one_set in several:
        most = one_set.get("max_new_tokens", 128)
        sampling.check_least(one_set.get("min_new_tokens"), most, "sampling_params.min_new_tokens")
        sampling.check_one_grammar(one_set, "sampling_params.")
    counts = {one_set.get("n", 1) for one_set in several}
    if len(counts) > 1:
        raise ParameterError("sampling_params.n", "must be the same for all prompts.")
    n_answers = n_prompts * counts.pop()
    is_empty = given[0] == "input_ids" and not kept["input_ids"]
    if is_empty and "session_params" not in kept:
        raise ParameterError("input_ids", "is empty.")
    if "session_params" in kept:
        _check_session_turn(kept, n_answers)
    most = max(one_set.get("max_new_tokens", 128) for one_set in several)
    _check_amount(n_answers, most, "sampling_params", limits)
    return Asked(kept, n_answers)


def _check_session_turn(kept: dict[str, Any], n_answers: int) -> None:
    if n_answers != 1 or isinstance(kept.get("input_ids", [None]) or [None], list) is False:
        raise ParameterError("session_params", "takes one prompt and one answer.")
    if isinstance(kept.get("text"), list):
        raise ParameterError("session_params", "takes one prompt and one answer.")
    if kept.get("logprob_start_len", -1) != -1:
        raise ParameterError("logprob_start_len", "is not for sessions: KV has no logprobs.")


def _check_lists(kept: dict[str, Any], n_prompts: int) -> None:
    """SGLang reads per-request lists by index, also those that are too short."""
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
            raise ParameterError(name, "has a name twice.")
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


def _token_lists(limits: NativeLimits) -> Check:
    one = list_of(sampling.token_id(limits), most=128)
    several = list_of(one, most=limits.max_answers)

    def check(value: Any, at: str) -> list:
        nested = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        return several(value, at) if nested else one(value, at)

    return check


def _media(value: Any, at: str) -> Any:
    """One source, or the sources of one prompt. The media guard looks at where they lie."""
    if isinstance(value, list):
        return list_of(text(2**26, least=1), most=64, least=1)(value, at)
    return text(2**26, least=1)(value, at)


def _n_prompts(prompts: Any, at: str) -> int:
    if isinstance(prompts, str):
        if not prompts:
            raise ParameterError(at, "is empty.")
        return 1
    if prompts and not isinstance(prompts[0], int):
        if any(not prompt for prompt in prompts):
            raise ParameterError(at, "has an empty prompt.")
        return len(prompts)
    return 1


def _check_amount(n_answers: int, most: int, at: str, limits: NativeLimits) -> None:
    if n_answers > limits.max_answers:
        raise ParameterError(at, f"asks for {n_answers} answers: at most {limits.max_answers}.")
    if n_answers * most > limits.max_new_tokens:
        raise ParameterError(
            at, f"asks for {n_answers} times {most} tokens: at most {limits.max_new_tokens}."
        )


# --- OpenAI's bodies ---


def _completion(body: Any, limits: NativeLimits) -> Asked:
    table = sampling.openai(limits) | {
        "model": text(512),
        "rid": _per_answer(_NAME, limits),
        "prompt": lambda v, at: (
            _texts(limits)(v, at)
            if isinstance(v, str) or (isinstance(v, list) and v and isinstance(v[0], str))
            else _ids(limits)(v, at)
        ),
        "echo": boolean,
        "logprobs": integer(0, sampling.MAX_TOP_LOGPROBS),
        "stream": boolean,
        "stream_options": fields(
            {"include_usage": boolean, "continuous_usage_stats": boolean},
            dropped=("include_obfuscation",),
        ),
        "json_schema": grammars.json_schema,
        "response_format": response_format,
        "return_token_ids": boolean,
        "best_of": integer(1, 1),
    }
    kept = fields(table, required=("prompt",), dropped=DROPPED)(body, "")
    n_prompts = _n_prompts(kept["prompt"], "prompt")
    if not kept["prompt"]:
        raise ParameterError("prompt", "is empty.")
    is_batch = isinstance(kept["prompt"], list) and not isinstance(kept["prompt"][0], int)
    rid = kept.get("rid")
    if isinstance(rid, list) and not (is_batch and len(set(rid)) == len(rid) == n_prompts):
        raise ParameterError("rid", f"must be one name, or one for each of {n_prompts}.")
    return _finished(kept, n_prompts, kept.get("max_tokens", 16), limits)


def _chat(body: Any, limits: NativeLimits) -> Asked:
    table = (
        sampling.openai(limits)
        | chat_fields(limits)
        | {
            "rid": _NAME,
            "max_completion_tokens": integer(1, limits.context_tokens),
            "logprobs": boolean,
            "top_logprobs": integer(0, sampling.MAX_TOP_LOGPROBS),
            "stream": boolean,
            "stream_options": fields(
                {"include_usage": boolean, "continuous_usage_stats": boolean},
                dropped=("include_obfuscation",),
            ),
            "response_format": response_format,
            "parallel_tool_calls": boolean,
            "modalities": _written_only,
        }
    )
    kept = fields(table, required=("messages",), dropped=DROPPED)(body, "")
    kept.pop("modalities", None)
    check_continued(kept)
    most = kept.get("max_completion_tokens") or kept.get("max_tokens")
    n_answers = kept.get("n", 1)
    if most is None and n_answers > 1:
        # Without a number each might be as long as the context.
        most = kept["max_tokens"] = min(limits.context_tokens, limits.max_new_tokens // n_answers)
    return _finished(kept, 1, most or 0, limits)


def _finished(kept: dict[str, Any], n_prompts: int, most: int, limits: NativeLimits) -> Asked:
    n_answers = n_prompts * kept.get("n", 1)
    sampling.check_least(kept.get("min_tokens"), most or limits.context_tokens, "min_tokens")
    sampling.check_one_grammar(kept, "")
    _check_amount(n_answers, most, "n", limits)
    return Asked(kept, n_answers)


# What OpenAI's clients may send and what changes no answer.
DROPPED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


def _written_only(value: Any, at: str) -> Any:
    if value != ["text"]:
        raise ParameterError(at, 'must be ["text"] here.')
    return value


def response_format(value: Any, at: str) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind == "structural_tag":
        return grammars.tag_object(value, at)
    if kind != "json_schema":
        raise ParameterError(f"{at}.type", "must be text, json_object or json_schema.")
    table: dict[str, Check] = {
        "name": text(256),
        "description": text(4_096),
        "schema": grammars.schema,
        "strict": boolean,
    }
    inner = fields(table, required=("schema",))(value.get("json_schema"), f"{at}.json_schema")
    return {"type": kind, "json_schema": {"name": "schema", **inner}}


def _tokenize(body: Any, limits: NativeLimits) -> Asked:
    table = chat_fields(limits) | {
        "prompt": _texts(limits),
        "add_special_tokens": boolean,
    }
    kept = fields(table)(body, "")
    if ("prompt" in kept) == ("messages" in kept):
        raise ParameterError("prompt", "give either prompt or messages.")
    check_continued(kept)
    return Asked(kept)
