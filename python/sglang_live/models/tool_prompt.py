"""Functions in prompts, and function calls: JSON between two tags.

The checkpoint's own chat template has the form of its training. If it does not support functions,
this module's own text describes them, with the same form of calls.
"""

import json
from contextlib import suppress
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder()


def instructions_with(
    tokenizer: Any, instructions: str, functions: list[str], system: tuple[str, str]
) -> str:
    """The content of the system message.

    Args:
        functions: JSON text of each, as in OpenAI's chat API.
        system: markup before and after that content; empty if the template has no such message.
    """
    if not functions:
        return instructions
    tools = [{"type": "function", "function": json.loads(text)} for text in functions]
    message = {"role": "system", "content": instructions}
    begin, end = system
    content = ""
    if begin and end:
        rendered = tokenizer.apply_chat_template([message], tools=tools, tokenize=False)
        _, _, content = rendered.partition(begin)
        content, _, _ = content.partition(end)
    if all(tool["function"]["name"] in content for tool in tools) and CALL_BEGIN in content:
        return content
    return f"{instructions}\n\n{_description_of(functions)}".lstrip()


def _description_of(functions: list[str]) -> str:
    lines = "\n".join(functions)
    form = '{"name": NAME, "arguments": OBJECT}'
    return (
        f"These functions can be called:\n{lines}\n"
        f"To call one, answer with {CALL_BEGIN}{form}{CALL_END} and nothing else."
    )


def opening_of(must_call: str) -> str:
    """The beginning of a response that is a function call.

    Args:
        must_call: the function's name; empty: any function.
    """
    if not must_call:
        return f'{CALL_BEGIN}\n{{"name": '
    name = json.dumps(must_call, ensure_ascii=False)
    return f'{CALL_BEGIN}\n{{"name": {name}, "arguments": '


class ResponseParts:
    """Splits a growing response into speech and function calls. All text after the first call
    belongs to calls. Without functions there are no calls, whatever the model writes.

    Attributes:
        n_spoken: the response's leading tokens that are to be spoken.
        spoken: their text.
        instead: a beginning of a response, and the call for which it stands (stand_ins.py).
    """

    def __init__(self, begin_id: int | None, has_functions: bool = True):
        """begin_id: the token of CALL_BEGIN; None if it is several tokens."""
        self._begin_id = begin_id
        self._has_functions = has_functions
        self.instead: tuple[str, str] | None = None
        self.n_spoken = 0
        self.spoken = ""
        self._calls = ""

    def begins_call(self, ids: list[int]) -> bool:
        """Whether the token that begins a call is among these, of the whole response so far."""
        return self._has_functions and self._begin_id in ids

    def take(self, ids: list[int], text: str) -> None:
        """Take the whole response so far."""
        if self.instead is not None:
            begin, call = self.instead
            if text.startswith(begin):
                self._calls = f"{CALL_BEGIN}{call}{CALL_END}"
            if text.startswith(begin) or begin.startswith(text):
                return
        at = text.find(CALL_BEGIN) if self._has_functions else -1
        if at >= 0:
            self.spoken = text[:at].rstrip()
            self._calls = text[at:]
            if self._begin_id in ids:
                self.n_spoken = ids.index(self._begin_id)
        elif not (self._has_functions and _may_begin_a_call(text)):
            self.n_spoken = len(ids)
            self.spoken = text

    def end(self, ids: list[int], text: str) -> None:
        """Take the complete response: an unfinished beginning of a call is speech."""
        if not self._calls:
            self.n_spoken = len(ids)
            self.spoken = text

    @property
    def has_call(self) -> bool:
        """Whether a call has begun."""
        return bool(self._calls)

    def calls(self) -> list[str]:
        """The text between the tags of each call; the last one may lack its end."""
        found, at = [], 0
        while (at := self._calls.find(CALL_BEGIN, at)) >= 0:
            begin = at + len(CALL_BEGIN)
            at = _end_of_call(self._calls, begin)
            found.append(_as_json(self._calls[begin:at].strip()))
        return found


def _as_json(call: str) -> str:
    """One in Step-Audio's form, `function`, its name and its arguments in a line each, in ours."""
    kind, _, rest = call.partition("\n")
    if kind.strip() != "function":
        return call
    name, _, arguments = rest.partition("\n")
    return f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments.strip() or "{}"}}}'


def _end_of_call(text: str, begin: int) -> int:
    """Where the next tag is. One in a string of the call's JSON is none."""
    content = text[begin:].lstrip()
    behind = len(text) - len(content)
    with suppress(ValueError, RecursionError):  # the model wrote something else
        behind += _JSON.raw_decode(content)[1]
    tags = [at for tag in (CALL_END, CALL_BEGIN) if (at := text.find(tag, behind)) >= 0]
    return min(tags, default=len(text))


def _may_begin_a_call(text: str) -> bool:
    tail = text[-len(CALL_BEGIN) + 1 :]
    return any(CALL_BEGIN.startswith(tail[i:]) for i in range(len(tail)))
