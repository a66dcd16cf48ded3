"""Changes to SGLang's responses before a client gets them."""

import re
from pathlib import Path
from typing import Any

import orjson

from sglang_live.errors import BadInputError, ContextLengthError, LiveError, StageFailedError

# Of some 600 fields only sizes: no keys, ports, paths or parts of the command line.
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
# Messages of SGLang's tokenizer and scheduler for prompts that do not fit. SGLang's code is 400.
_TOO_LONG = re.compile(
    r"longer than the model's context length|exceeds the (model's maximum context length"
    r"|maximum allowed length \()"
)
_PATHS = ("model_path", "tokenizer_path")


def server_info(info: dict[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in _SERVER_FIELDS if name in info}


def model_info(info: dict[str, Any]) -> dict[str, Any]:
    """Reduces paths to their last part, by which clients choose a chat template."""
    kept = {name: value for name, value in info.items() if name != "preferred_sampling_params"}
    return kept | {n: Path(kept[n]).name for n in _PATHS if isinstance(kept.get(n), str)}


def too_long(body: bytes) -> ContextLengthError | None:
    """Returns the error of a response of status 400 if its prompt exceeds the context."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    fault = data.get("error", data) if isinstance(data, dict) else None
    message = fault.get("message") if isinstance(fault, dict) else None
    if isinstance(message, str) and _TOO_LONG.search(message):
        return ContextLengthError(message)
    return None


def early_error(event: bytes) -> LiveError | None:
    """Returns the error in the first event of a stream; None if the event is output."""
    if not event.startswith(b"data:"):
        return None
    try:
        data = orjson.loads(event[5:].strip())
    except orjson.JSONDecodeError:
        return None
    if not isinstance(data, dict):
        return None
    fault = data.get("error")
    if fault is None:
        meta = data.get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(reason, dict) or reason.get("type") != "abort":
            return None
        fault = {"message": reason.get("message"), "code": reason.get("status_code") or 400}
    if not isinstance(fault, dict):
        fault = {"message": str(fault)}
    code, message = fault.get("code"), str(fault.get("message") or "the engine refused it")
    if _TOO_LONG.search(message):
        return ContextLengthError(message)
    is_bad_input = isinstance(code, int) and 400 <= code < 500
    return BadInputError(message) if is_bad_input or code is None else StageFailedError(message)
