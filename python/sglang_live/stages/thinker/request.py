"""What a ThinkerRequest asks of the engine: SGLang's sampling parameters, and a bound of KV."""

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_live.engine_channel.inbox import CONTINUED
from sglang_live.kv.retention import RetentionConfig
from sglang_live.messages import ThinkerRequest
from sglang_live.models.grammars.call_grammar import MAX_CALL_TOKENS, call_grammar

MAX_RESPONSE_TOKENS = 1024


def sampling_of(
    request: ThinkerRequest, defaults: Mapping[str, float], end_ids: Sequence[int]
) -> dict[str, Any]:
    """
    Args:
        defaults: of the checkpoint, by SGLang's names.
        end_ids: tokens that end a response.
    Raises:
        BadInputError: no grammar can be made of the function that the response has to call.
    """
    if request.options:  # the probabilities of the model itself
        return {"max_new_tokens": 1, "temperature": 1.0, "stop_token_ids": list(end_ids)}
    forced = request.must_call is not None and not request.prefill_only
    n_max = request.max_tokens
    if n_max is None:
        own = int(defaults.get("max_new_tokens", MAX_RESPONSE_TOKENS))
        n_max = MAX_CALL_TOKENS if forced else own
    sampling: dict[str, Any] = dict(defaults)
    if request.temperature is not None:
        sampling["temperature"] = request.temperature
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    if forced and request.must_call is not None:
        sampling["ebnf"] = call_grammar(tuple(request.functions), request.must_call)
        # Where the grammar ends, no token but the end is allowed.
        sampling.pop("min_new_tokens", None)
    n_left = max(0, n_max - len(request.continues))
    if "min_new_tokens" in sampling:
        n_min = max(0, sampling["min_new_tokens"] - len(request.continues))
        sampling["min_new_tokens"] = min(n_min, n_left)
    if request.continues:
        sampling["custom_params"] = {CONTINUED: len(request.continues)}
    return {**sampling, "max_new_tokens": n_left, "stop_token_ids": list(end_ids)}


def retention_of(request: ThinkerRequest) -> RetentionConfig | None:
    if request.window_tokens is None:
        return None
    return RetentionConfig(
        sink_tokens=request.sink_tokens,
        window_tokens=request.window_tokens,
        slack_tokens=request.slack_tokens,
        within_tokens=request.within_tokens,
    )
