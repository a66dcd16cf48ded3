"""Control tokens that users write in a chat are text.

In: messages and tools of /v1/chat/completions. Out: the same, without a control token of ChatML.
SGLang renders a chat to one string before it is tokenised, so `<|im_end|>` in a user's words would
end the message, and `<|audio_pad|>` stand for a clip. /generate and /v1/completions take prompts
that their clients have rendered; these are left as they are.
"""

import re
from typing import Any

_NAME = r"[A-Za-z0-9_]"
_CONTROL = re.compile(rf"<(?=\|{_NAME}{{1,48}}\|>|tts_{_NAME}{{1,48}}>)")
# Templates write the texts of one message without anything between them.
_BEGUN = re.compile(rf"<(?=(?:\|(?:{_NAME}{{1,48}}\|?)?|t|tt|tts|tts_{_NAME}{{0,48}})?\Z)")
# A character that is not seen, and keeps the two beside it from being one token.
_APART = "<\u200b"
_MEDIA = frozenset({"image_url", "audio_url", "video_url", "input_audio"})


def without_control_tokens(value: Any, *, is_part: bool = False) -> Any:
    """A copy of a JSON value whose texts hold no control token. is_part: others may follow it."""
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
