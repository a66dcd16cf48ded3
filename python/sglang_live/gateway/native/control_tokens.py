"""Control tokens in clients' texts, made plain text.

In: messages and tools of /v1/chat/completions. Out: the same, without a control token of ChatML.
SGLang renders a chat to one string before it tokenizes it, so that `<|im_end|>` in a user's words
would end the message, and `<|audio_pad|>` would stand for a clip. Prompts of /generate and
/v1/completions are rendered by their clients and stay as they are.
"""

import re
from typing import Any

_NAME = r"[A-Za-z0-9_]"
_CONTROL = re.compile(rf"<(?=\|{_NAME}{{1,48}}\|>|tts_{_NAME}{{1,48}}>)")
# The beginning of a token at the end of a part: templates join the texts of one message directly.
_BEGUN = re.compile(rf"<(?=(?:\|(?:{_NAME}{{1,48}}\|?)?|t|tt|tts|tts_{_NAME}{{0,48}})?\Z)")
# An invisible character, which keeps its two neighbors from forming one token.
_APART = "<\u200b"
_MEDIA = frozenset({"image_url", "audio_url", "video_url", "input_audio"})


def without_control_tokens(value: Any, *, is_part: bool = False) -> Any:
    """Returns a copy of a JSON value whose texts hold no control token.

    is_part: whether other texts may follow the value directly.
    """
    match value:
        case str():
            text = _CONTROL.sub(_APART, value)
            return _BEGUN.sub(_APART, text) if is_part else text
        case list():
            return [without_control_tokens(part, is_part=True) for part in value]
        case dict():
            return {
                without_control_tokens(key): part
                if key in _MEDIA
                else without_control_tokens(part, is_part=is_part)
                for key, part in value.items()
            }
    return value
