"""Claims about texts that are spoken word for word."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_live.messages import ScriptRequest, TextTokens, ThinkerDone, UserSegment
from sglang_live.speakable.style import SpeechStyle
from sglang_live.stages.thinker.given_text import recite
from test.unit.stages.fake_engine import PROMPT


async def recited(text: str) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    job = SimpleNamespace(job_id="job", send=send)
    await recite(job, ScriptRequest("job", text, "key", 1.0), PROMPT)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("text", ["—", "<speak></speak>", "\u200b", "😀"])
async def test_a_talker_gets_no_token_of_a_text_without_a_sound(text):
    segment, tokens, done = await recited(text)
    assert isinstance(segment, UserSegment) and isinstance(tokens, TextTokens)
    assert (tokens.ids, tokens.text) == ([], "")
    assert isinstance(done, ThinkerDone) and done.ids == []


async def test_a_talker_of_words_gets_words(monkeypatch):
    _, tokens, _ = await recited("It costs $5 😀")
    assert tokens.text == "It costs $5 "
    monkeypatch.setattr(PROMPT, "script_style", SpeechStyle(folds=True))
    _, tokens, _ = await recited("It costs $5 😀")
    assert tokens.text == "It costs five dollars."
    assert tokens.ids == PROMPT.words(tokens.text)
