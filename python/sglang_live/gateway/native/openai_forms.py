"""Bodies in OpenAI's form: /v1/completions and /v1/chat/completions."""

from typing import Any

from sglang_live.gateway.chat.answers import SpokenAnswers
from sglang_live.gateway.native import grammars, sampling
from sglang_live.gateway.native.chat import chat_fields, check_continued
from sglang_live.gateway.native.checks import (
    Check,
    ParameterError,
    boolean,
    fields,
    integer,
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
)

# Fields of OpenAI's clients that change no completion.
_DROPPED = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    "prompt_cache_retention",
)
# Fields without an effect on what is written, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": ([],),
    "moderation": (),
    "prediction": (),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def completion(body: Any, limits: NativeLimits) -> CheckedBody:
    table = sampling.openai(limits) | {
        "model": text(512),
        "rid": per_prompt(NAME, limits),
        "prompt": lambda v, at: (
            texts(limits)(v, at)
            if isinstance(v, str) or (isinstance(v, list) and v and isinstance(v[0], str))
            else ids(limits)(v, at)
        ),
        "echo": boolean,
        "logprobs": integer(0, sampling.MAX_TOP_LOGPROBS),
        "stream": boolean,
        "stream_options": fields(
            {"include_usage": boolean, "continuous_usage_stats": boolean},
            dropped=("include_obfuscation",),
        ),
        "json_schema": grammars.json_schema,
        "response_format": _response_format,
        "return_token_ids": boolean,
        "best_of": integer(1, 1),
    }
    kept = fields(table, required=("prompt",), dropped=_DROPPED, neutral=_NEUTRAL)(body, "")
    n_prompts = count_prompts(kept["prompt"], "prompt")
    if not kept["prompt"]:
        raise ParameterError("prompt", "is empty.")
    is_batch = isinstance(kept["prompt"], list) and not isinstance(kept["prompt"][0], int)
    rid = kept.get("rid")
    if isinstance(rid, list) and not (is_batch and len(set(rid)) == len(rid) == n_prompts):
        raise ParameterError("rid", f"must be one name, or one for each of {n_prompts}.")
    return _finished(kept, n_prompts, kept.get("max_tokens", 16), limits)


def chat(body: Any, limits: NativeLimits, answers: SpokenAnswers) -> CheckedBody:
    table = (
        sampling.openai(limits)
        | chat_fields(limits, answers)
        | {
            "rid": NAME,
            "max_completion_tokens": integer(1, limits.context_tokens),
            "logprobs": boolean,
            "top_logprobs": integer(0, sampling.MAX_TOP_LOGPROBS),
            "stream": boolean,
            "stream_options": fields(
                {"include_usage": boolean, "continuous_usage_stats": boolean},
                dropped=("include_obfuscation",),
            ),
            "response_format": _response_format,
            "parallel_tool_calls": boolean,
            "modalities": _text_only,
        }
    )
    known = fields(table, required=("messages",), dropped=_DROPPED, neutral=_NEUTRAL)
    kept = known(body, "")
    kept.pop("modalities", None)
    check_continued(kept)
    most = kept.get("max_completion_tokens") or kept.get("max_tokens")
    n_completions = kept.get("n", 1)
    if most is None and n_completions > 1:
        # Without a maximum each completion might be as long as the context.
        most = kept["max_tokens"] = min(
            limits.context_tokens, limits.max_new_tokens // n_completions
        )
    return _finished(kept, 1, most or 0, limits)


def _finished(kept: dict[str, Any], n_prompts: int, most: int, limits: NativeLimits) -> CheckedBody:
    n_completions = n_prompts * kept.get("n", 1)
    sampling.check_least(kept.get("min_tokens"), most or limits.context_tokens, "min_tokens")
    sampling.check_one_grammar(kept, "")
    check_amount(n_completions, most, "n", limits)
    return CheckedBody(kept, n_completions)


def _text_only(value: Any, at: str) -> Any:
    if value != ["text"]:
        raise ParameterError(at, 'must be ["text"] here.')
    return value


def _response_format(value: Any, at: str) -> dict[str, Any]:
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
