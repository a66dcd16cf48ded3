"""The body of each proxied route: its fields, and how many completions it requests.

In: JSON as it was sent. Out: CheckedBody, or ClientEventError. On routes of SGLang alone, a null is
an absent field, whatever its name.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_live.gateway.chat.form import ChatForm, TokenizeForm, templated, written
from sglang_live.gateway.chat.messages import SpokenAnswers
from sglang_live.gateway.errors import ParameterError
from sglang_live.gateway.json_forms import (
    Strict,
    check_neutral,
    read_value,
    unknown_parameter,
)
from sglang_live.gateway.native.limits import NativeLimits
from sglang_live.gateway.native.sampling import (
    CheckedBody,
    Count,
    Id,
    Name,
    OpenaiForm,
    Priority,
    Sampling,
    Seed,
    TopLogprobs,
    check_least,
    check_one_grammar,
)

Form = Callable[[Any], CheckedBody]

_DEFAULT_TOKENS = 128  # SGLang's own
_MEDIA = ("audio_data", "image_data", "video_data")
_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Ids = list[Id | list[Id]]
_Start = Annotated[int, Meta(ge=-1)]
_Source = Annotated[str, Meta(min_length=1, max_length=2**26)]
_OfPrompt = Annotated[list[_Source], Meta(min_length=1, max_length=64)]
# One source, the sources of one prompt, or those of each; MediaGuard checks their locations.
_Media = _Source | Annotated[list[_Source | _OfPrompt], Meta(max_length=64)]


class SamplingParams(Sampling, kw_only=True):
    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    json_schema: str | None = None
    structural_tag: str | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=1_024)] | None = None
    sampling_seed: Seed | None = None
    beam_width: Literal[1] | None = None

    @property
    def most(self) -> int:
        return _DEFAULT_TOKENS if self.max_new_tokens is None else self.max_new_tokens


class SessionParams(Strict, omit_defaults=True):
    id: _Name
    rid: _Name | None = None
    offset: Count | None = None
    drop_previous_output: bool | None = None


class GenerateForm(Strict, kw_only=True, omit_defaults=True):
    """SGLang's own form, with lists of prompts and of values for each prompt."""

    rid: _Name | list[_Name] | None = None
    text: str | list[str] | None = None
    input_ids: _Ids | None = None
    audio_data: _Media | None = None
    image_data: _Media | None = None
    video_data: _Media | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: _Start | list[_Start] | None = None
    top_logprobs_num: TopLogprobs | list[TopLogprobs] | None = None
    token_ids_logprob: _Ids | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    log_metrics: bool | None = None
    priority: Priority | None = None
    session_params: SessionParams | None = None


class CompletionForm(OpenaiForm, kw_only=True):
    prompt: str | list[str | Id | list[Id]]
    rid: _Name | list[_Name] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    json_schema: str | None = None
    return_token_ids: bool | None = None
    best_of: Literal[1] | None = None
    audio: Any = None


class DetokenizeForm(Strict, kw_only=True, omit_defaults=True):
    tokens: _Ids
    model: Name | None = None
    skip_special_tokens: bool | None = None


class OpenSessionForm(Strict, kw_only=True, omit_defaults=True):
    """`retention` is the gateway's own field: take_retention has removed it."""

    capacity_of_str_len: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    session_id: _Name | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Meta(ge=1, le=86_400)] | None = None


class CloseSessionForm(Strict):
    session_id: _Name


class AbortForm(Strict, omit_defaults=True):
    rid: _Name
    abort_all: bool | None = None


def forms(limits: NativeLimits, answers: SpokenAnswers) -> dict[str, Form]:
    return {
        "/generate": lambda body: _generate(body, limits),
        "/v1/completions": lambda body: _completion(_read(body, CompletionForm), limits),
        "/v1/chat/completions": lambda body: written(_read(body, ChatForm), limits, answers),
        "/v1/tokenize": lambda body: _tokenize(body, limits, answers),
        "/v1/detokenize": lambda body: _detokenize(body, limits),
        "/open_session": lambda body: _plain(body, OpenSessionForm),
        "/close_session": lambda body: _plain(body, CloseSessionForm),
        "/abort_request": _abort,
    }


def _read(body: Any, form: type[Any]) -> Any:
    if not isinstance(body, dict):
        raise ParameterError("body", "must be an object.", is_kind=False)
    return read_value(body, form, "")


def _without_nulls(body: Any) -> Any:
    if isinstance(body, dict):
        return {name: value for name, value in body.items() if value is not None}
    return body


def _plain(body: Any, form: type[Any]) -> CheckedBody:
    return CheckedBody(msgspec.to_builtins(_read(_without_nulls(body), form)))


def _abort(body: Any) -> CheckedBody:
    checked = _plain(body, AbortForm)
    if checked.body.pop("abort_all", None):
        raise ParameterError("abort_all", "would end the requests of other clients: name a rid.")
    return checked


def _tokenize(body: Any, limits: NativeLimits, answers: SpokenAnswers) -> CheckedBody:
    form: TokenizeForm = _read(_without_nulls(body), TokenizeForm)
    if (form.prompt is None) == (form.messages is None):
        raise ParameterError("prompt", "give either prompt or messages.")
    if form.prompt is not None:
        limits.check_texts(form.prompt, "prompt")
    return CheckedBody(msgspec.to_builtins(form) | templated(form, limits, answers))


def _detokenize(body: Any, limits: NativeLimits) -> CheckedBody:
    checked = _plain(body, DetokenizeForm)
    limits.check_ids(checked.body["tokens"], "tokens")
    return checked


def _completion(form: CompletionForm, limits: NativeLimits) -> CheckedBody:
    check_neutral(form.audio, (), "audio")
    body = form.to_sglang(limits)
    prompt = form.prompt
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], str)):
        limits.check_texts(prompt, "prompt")
    else:
        limits.check_ids(prompt, "prompt")
    n_prompts = _count(prompt, "prompt")
    if not prompt:
        raise ParameterError("prompt", "is empty.")
    rid = form.rid
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    if isinstance(rid, list) and not (is_list and len(set(rid)) == len(rid) == n_prompts):
        raise ParameterError("rid", f"must be one name, or one for each of {n_prompts}.")
    return form.counted(body, limits, most=form.max_tokens or 16, n_prompts=n_prompts)


# --- /generate ---


def _generate(body: Any, limits: NativeLimits) -> CheckedBody:
    body = _without_nulls(body)
    if isinstance(body, dict) and (params := body.get("sampling_params")):
        several = isinstance(params, list)
        body["sampling_params"] = (
            list(map(_without_nulls, params)) if several else _without_nulls(params)
        )
    form: GenerateForm = _read(body, GenerateForm)
    for name in _MEDIA[1:]:
        if getattr(form, name) is not None and not limits.takes_images:
            raise unknown_parameter(name)
    n_prompts = _count_prompts(form, limits)
    _check_lists(form, n_prompts, limits)
    n_each, most = _check_sampling(form, limits)
    n_completions = n_prompts * n_each
    if form.session_params is not None:
        _check_session_turn(form, n_completions, limits)
    limits.check_amount(n_completions, most, "sampling_params")
    return CheckedBody(msgspec.to_builtins(form), n_completions)


def _count_prompts(form: GenerateForm, limits: NativeLimits) -> int:
    if (form.text is None) == (form.input_ids is None):
        raise ParameterError("text", "give either text or input_ids.")
    if form.text is not None:
        limits.check_texts(form.text, "text")
        return _count(form.text, "text")
    media = next((name for name in _MEDIA if getattr(form, name) is not None), None)
    if media is not None:
        # SGLang decodes the ids to find the place of the media, and fails on ids without a text.
        raise ParameterError(media, "needs its place in a text, not in input_ids.")
    ids = form.input_ids or []
    if not ids and form.session_params is None:
        raise ParameterError("input_ids", "is empty.")
    limits.check_ids(ids, "input_ids")
    return _count(ids, "input_ids")


def _count(prompts: Any, at: str) -> int:
    """The number of prompts: texts or lists of ids, or one of either."""
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], int):
        if prompts == "":
            raise ParameterError(at, "is empty.")
        return 1
    if not all(prompts):
        raise ParameterError(at, "has an empty prompt.")
    return len(prompts)


def _check_sampling(form: GenerateForm, limits: NativeLimits) -> tuple[int, int]:
    """Number of completions per prompt, and tokens of the longest."""
    at, params = "sampling_params", form.sampling_params or SamplingParams()
    several = params if isinstance(params, list) else [params]
    for n, one_set in enumerate(several):
        place = f"{at}[{n}]." if isinstance(params, list) else f"{at}."
        one_set.check(limits, place)
        for name in ("max_new_tokens", "min_new_tokens"):
            limits.check_tokens(getattr(one_set, name), place + name)
        check_least(one_set.min_new_tokens, one_set.most, f"{at}.min_new_tokens")
        check_one_grammar(msgspec.to_builtins(one_set), f"{at}.")
    counts = {one_set.n or 1 for one_set in several}
    if len(counts) > 1:
        raise ParameterError(f"{at}.n", "must be the same for all prompts.")
    return counts.pop(), max(one_set.most for one_set in several)


def _check_session_turn(form: GenerateForm, n_completions: int, limits: NativeLimits) -> None:
    assert form.session_params is not None
    limits.check_tokens(form.session_params.offset, "session_params.offset")
    if n_completions != 1 or isinstance(form.text, list):
        raise ParameterError("session_params", "takes one prompt and one completion.")
    if form.logprob_start_len not in (None, -1):
        raise ParameterError(
            "logprob_start_len", "cannot be used with a session: its KV has no logprobs."
        )


def _check_lists(form: GenerateForm, n_prompts: int, limits: NativeLimits) -> None:
    """Check the lengths of per-prompt lists: SGLang reads them by index without a check."""
    is_batch = isinstance(form.text, list) or _is_nested(form.input_ids)
    names = ("rid", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    for name in names:
        value = getattr(form, name)
        if isinstance(value, list) and not (is_batch and len(value) == n_prompts):
            raise ParameterError(name, f"must be one value, or one for each of {n_prompts}.")
    if isinstance(form.rid, list) and len(set(form.rid)) != len(form.rid):
        raise ParameterError("rid", "contains a name twice.")
    limits.check_tokens(form.logprob_start_len, "logprob_start_len")
    lists = form.token_ids_logprob or []
    limits.check_ids(lists, "token_ids_logprob", most=128)
    if _is_nested(lists) and not (is_batch and len(lists) == n_prompts):
        raise ParameterError("token_ids_logprob", f"needs one list for each of {n_prompts}.")
    if is_batch and isinstance(form.audio_data, list) and len(form.audio_data) != n_prompts:
        raise ParameterError("audio_data", f"needs one entry for each of {n_prompts}.")
    params = form.sampling_params or []
    sets = params if isinstance(params, list) else [params]
    has_n = any((one_set.n or 1) > 1 for one_set in sets)
    if has_n and any(isinstance(getattr(form, name), list) for name in names[2:]):
        raise ParameterError("sampling_params.n", "cannot be used with values for each prompt.")


def _is_nested(ids: list[Any] | None) -> bool:
    return ids is not None and any(isinstance(one, list) for one in ids[:1])
