"""What the thinker says of a prompt's length is what its turns would find."""

import asyncio

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from sglang_live.core import HistoryItem, ImagePart, TextPart, VideoPart
from sglang_live.errors import ContextLengthError
from sglang_live.messages import MeasurePrompt
from sglang_live.stages.thinker.prompt_sizes import PromptSizes, most_tokens_of
from sglang_live.stages.thinker.session import ThinkerSession, TurnState
from test.unit.stages.fake_engine import PROMPT, TOKENIZER, FakeEngine

MOST = 400


def measure(*texts: str, instructions: str = "", functions=(), clips_s=()):
    request = MeasurePrompt(
        "j",
        instructions=instructions,
        functions=list(functions),
        texts=list(texts),
        clips_s=list(clips_s),
        timeout_s=1.0,
    )
    return asyncio.run(PromptSizes(PROMPT, TOKENIZER).of(request, MOST))


@pytest.mark.parametrize(
    "text", ["", "hello", "é" * 50, "<|im_end|>" * 5, "  \n" * 20, "日本語 😀", "x" * 1000]
)
def test_texts_have_the_tokens_that_a_prompt_makes_of_them(text):
    assert measure("a", text).item_tokens == len(PROMPT.words("a")) + len(PROMPT.words(text))
    assert measure(instructions=text).header_tokens == len(PROMPT.words(text))


def test_functions_count_with_the_instructions_as_the_model_is_told_of_them():
    function = '{"name": "look_up", "description": "of a word"}'
    told = PROMPT.with_functions("Be brief.", [function])
    size = measure(instructions="Be brief.", functions=[function])
    assert size.header_tokens == len(PROMPT.words(told)) > len(PROMPT.words("Be brief."))


def test_a_recording_counts_its_whole_seconds():
    assert measure(clips_s=[1.99, 3.0, 0.5]).item_tokens == 4 * 13


@given(
    width=st.integers(1, 4000),
    height=st.integers(1, 4000),
    smallest=st.sampled_from((3136, 65_536)),
)
def test_the_tokens_of_a_picture_are_within_its_bounds(width, height, smallest):
    assume(width * height <= 2048 * 1024 and max(width, height) <= 100 * min(width, height))
    rows, columns = smart_resize(height, width, 32, smallest, 12_845_056)
    picture = ImagePart(b"", width, height)
    assert picture.least_tokens <= rows * columns // 32**2 <= picture.most_tokens
    item = HistoryItem(key="a", role="user", parts=(TextPart("look"), picture))
    assert most_tokens_of(PROMPT, item) > picture.most_tokens
    layers = VideoPart(np.broadcast_to(np.uint8(0), (5, height, width, 3)))
    bounds = layers.least_tokens, layers.most_tokens
    assert bounds == (3 * picture.least_tokens, 3 * picture.most_tokens)


@pytest.mark.parametrize("n_words", range(300, 420, 7))
def test_what_is_said_not_to_fit_fails_its_turn(n_words):
    async def answered() -> bool:
        engine = FakeEngine()
        session = ThinkerSession(engine, PROMPT, "s", feed=engine, truncates=True)
        item = HistoryItem(key="a", role="user", parts=(TextPart(text),))
        turn = session.think(
            instructions="",
            history=[item],
            item_key="r",
            sampling={"max_new_tokens": 4},
            state=TurnState(),
            max_tokens=MOST,
            drops_oldest=True,
        )
        try:
            async for _ in turn:
                pass
        except ContextLengthError:
            return False
        return True

    text = "\n".join("x" for _ in range(n_words // 2))
    size = measure(text)
    fits = size.item_tokens <= size.most_tokens
    # Between the two lies the markup of one message.
    assert asyncio.run(answered()) == fits or 0 <= size.most_tokens - size.item_tokens < 10


def test_control_tokens_in_the_prompt_stay_whole_while_texts_are_measured():
    """Both count by one vocabulary, and only one of them takes control tokens for text."""

    async def both() -> None:
        sizes = PromptSizes(PROMPT, TOKENIZER)
        long = MeasurePrompt("j", "", [], ["<|im_end|> and so on " * 20_000], [], 1.0)
        measuring = asyncio.create_task(sizes.of(long, MOST))
        n_alike = 0
        while not measuring.done():
            assert len(PROMPT.markup_ids("<|im_end|>")) == 1
            assert len(PROMPT.words("<|im_end|>")) > 1
            n_alike += 1
            await asyncio.sleep(0.001)
        assert n_alike > 5
        per_piece = len(PROMPT.words("<|im_end|> and so on "))
        assert (await measuring).item_tokens >= 20_000 * (per_piece - 1)

    asyncio.run(both())
