"""Function calls that SGLang's own chat API has to make: bounded like those of spoken responses."""

from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_live.models.grammars.call_grammar import MAX_CALL_TOKENS, calls_grammar

_MOST_CALLS = 8


def bound_calls(
    sampling: dict[str, Any],
    request: ChatCompletionRequest,
    stop: list[str],
    model_generation_config: dict[str, Any],
    tool_call_constraint: tuple[str, Any] | None = None,
    renderer_handles_response_format: bool = False,
) -> None:
    """After ChatCompletionRequest.to_sampling_params: put the bounded grammar of the calls in the
    place of SGLang's. A model with a parser of its own form keeps SGLang's grammar."""
    choice = request.tool_choice
    if tool_call_constraint is None or choice in ("auto", "none"):
        return
    if sampling.get("max_new_tokens") is None:
        sampling["max_new_tokens"] = MAX_CALL_TOKENS
    if tool_call_constraint[0] != "json_schema":
        return
    functions = [tool.function for tool in request.tools or ()]
    if not isinstance(choice, str):
        functions = [one for one in functions if one.name == choice.function.name]
    parameters = {one.name: one.parameters or {} for one in functions}
    del sampling["json_schema"]
    sampling["ebnf"] = calls_grammar(
        parameters, most=_MOST_CALLS if request.parallel_tool_calls else 1
    )
