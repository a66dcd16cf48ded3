"""What of SGLang's answers is changed on the way to a client."""

import re
from pathlib import Path
from typing import Any

import orjson

from sglang_live.errors import BadInputError, ContextLengthError, LiveError, StageFailedError

# Of some 600 fields: sizes, and nothing of keys, ports, paths or the command line.
_SERVER_FIELDS = (
    "version",
    "served_model_name",
    "context_length",
    "max_total_num_tokens",
    "max_req_input_len",
    "max_running_requests",
    "chunked_prefill_size",
    "page_size",
    "dtype",
    "kv_cache_dtype",
    "device",
    "tp_size",
    "dp_size",
    "attention_backend",
    "schedule_policy",
)
# What SGLang's tokenizer and its scheduler say of prompts that do not fit. Its own code is 400.
_TOO_LONG = re.compile(
    r"longer than the model's context length|exceeds the (model's maximum context length"
    r"|maximum allowed length \()"
)
_PATHS = ("model_path", "tokenizer_path")


def server_info(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in _SERVER_FIELDS if name in told}


def model_info(told: dict[str, Any]) -> dict[str, Any]:
    """Paths are cut to their last part, by which clients choose a chat template."""
    kept = {name: value for name, value in told.items() if name != "preferred_sampling_params"}
    return kept | {n: Path(kept[n]).name for n in _PATHS if isinstance(kept.get(n), str)}


def too_long(body: bytes) -> ContextLengthError | None:
    """The error in an answer of status 400, if the prompt does not fit into the context."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    fault = told.get("error", told) if isinstance(told, dict) else None
    message = fault.get("message") if isinstance(fault, dict) else None
    is_too_long = isinstance(message, str) and _TOO_LONG.search(message)
    return ContextLengthError(message) if is_too_long else None


def early_error(event: bytes) -> LiveError | None:
    """The error in the first event of a stream; None: it is the beginning of an answer."""
    if not event.startswith(b"data:"):
        return None
    try:
        told = orjson.loads(event[5:].strip())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(told, dict):
        return None
    fault = told.get("error")
    if fault is None:
        meta = told.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(reason, dict) or reason.get("type") != "abort":
            return None
        fault = {"message": reason.get("message"), "code": reason.get("status_code") or 400}
    if not isinstance(fault, dict):
        fault = {"message": str(fault)}
    code, message = fault.get("code"), str(fault.get("message") or "the engine refused it")
    if _TOO_LONG.search(message):
        return ContextLengthError(message)
    is_ours = isinstance(code, int) and 400 <= code < 500
    return BadInputError(message) if is_ours or code is None else StageFailedError(message)
