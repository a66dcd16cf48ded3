"""The thinker of a cascade: any language model with a chat template, whose users are heard as text.

The reference is transformers with the checkpoint's own chat template.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from lab.poison import POISON
from sglang_live.core import HistoryItem, Tools
from sglang_live.errors import StageFailedError
from sglang_live.kv.retention import RetentionConfig
from test.engine import tiny_cascade
from test.engine.conftest import Stages, running_stages
from test.engine.gauges import total
from test.engine.turns import greedy_turn, reply_of, think, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = "You are a kind assistant."
POLICIES = ("urgency", "pacing", "truncate", "retention", "next-use")
N_TOKENS = 24
WINDOW, SLACK = 60, 8
SET_TIMER = json.dumps(
    {
        "name": "set_timer",
        "parameters": {
            "type": "object",
            "properties": {
                "minutes": {"type": "integer", "minimum": 1, "maximum": 9},
                "sound": {"enum": ["bell", None]},
            },
            "required": ["minutes", "sound"],
        },
    }
)
HANG_UP = json.dumps({"name": "hang_up"})
SPEECH = np.full(16_000, 1000, np.int16)


@pytest.fixture(scope="module")
def cascade(tmp_path_factory) -> Path:
    return tiny_cascade.build(tmp_path_factory.mktemp("cascade"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(cascade, tmp_path_factory):
    running = running_stages(
        cascade,
        tmp_path_factory.mktemp("cascade-stages"),
        policies=POLICIES,
        thinker_environment=POISON,
        names=("thinker",),
        family=tiny_cascade.FAMILY,
    )
    async with running as started:
        yield started


class Model:
    """The language model in transformers, with KV that can be dropped as a session's."""

    def __init__(self, cascade: Path):
        llm = cascade.parent / "llm"
        self.tokenizer = AutoTokenizer.from_pretrained(llm)
        self.model = LlamaForCausalLM.from_pretrained(llm, dtype=torch.float32).eval()
        self.cache, self.ids = DynamicCache(), []

    def prompt(self, messages: list[tuple[str, str]]) -> list[int]:
        listed = [{"role": role, "content": text} for role, text in messages]
        text = self.tokenizer.apply_chat_template(
            listed, tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def append(self, ids: list[int]) -> int:
        """Compute these tokens. Returns the most likely next one."""
        self.ids += ids
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), past_key_values=self.cache)
        return int(out.logits[0, -1].argmax())

    def generate(self, prompt: list[int], n_tokens: int) -> list[int]:
        found = [self.append(prompt)]
        while len(found) < n_tokens:
            found.append(self.append([found[-1]]))
        return found

    def drop(self, begin: int, end: int) -> None:
        """Drop tokens; the keys behind them are rotated to the positions that are then theirs."""
        del self.ids[begin:end]
        angle = (end - begin) * self.model.model.rotary_emb.inv_freq
        cos, sin = (torch.cat([f(angle)] * 2) for f in (torch.cos, torch.sin))
        for layer in self.cache.layers:
            behind = layer.keys[:, :, end:]
            first, second = behind.chunk(2, dim=-1)
            # By a negative angle: to an earlier position.
            behind = behind * cos - torch.cat([-second, first], dim=-1) * sin
            layer.keys = torch.cat([layer.keys[:, :, :begin], behind], dim=2)
            layer.values = torch.cat([layer.values[:, :, :begin], layer.values[:, :, end:]], dim=2)


@pytest.fixture
def model(cascade) -> Model:
    return Model(cascade)


async def test_tokens_equal_those_of_transformers_over_two_turns(stages, model):
    links = stages.links("two-turns")
    first = user("tell me why")
    turn = greedy_turn(first, system=SYSTEM, n_tokens=N_TOKENS)
    done = await think(links, turn)
    expected = model.generate(model.prompt([("system", SYSTEM), ("user", "tell me why")]), N_TOKENS)
    assert done.ids == expected
    second = greedy_turn(
        first, reply_of(turn, done), user("go on"), system=SYSTEM, n_tokens=N_TOKENS
    )
    again = await think(links, second)
    tail = model.tokenizer.encode(
        "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n",
        add_special_tokens=False,
    )
    assert again.ids == model.generate([expected[-1], *tail], N_TOKENS)
    # All but the end of the last response and the new message was kept.
    assert again.n_cached >= done.n_prompt + N_TOKENS - 1
    links.close()


async def test_speech_is_read_as_the_words_that_the_recogniser_heard(stages, model):
    links = stages.links("spoken")
    done = await think(links, greedy_turn(user(SPEECH), system=SYSTEM, n_tokens=N_TOKENS))
    prompt = model.prompt([("system", SYSTEM), ("user", tiny_cascade.HEARD)])
    assert done.ids == model.generate(prompt, N_TOKENS)
    assert done.n_prompt == len(prompt) and done.n_audio == 0
    links.close()


async def test_speech_is_prefilled_up_to_its_last_pause_while_the_user_speaks(stages, model):
    links = stages.links("in-pauses")
    first = replace(user(SPEECH), closes=False)
    second = replace(user(SPEECH[: len(SPEECH) // 2]), opens=False, closes=False)
    end = HistoryItem(key="end", role="user", parts=(), opens=False)
    given_up = replace(user(SPEECH), opens=False, closes=False)
    for said in ((first,), (first, given_up), (first, second)):
        turn = greedy_turn(*said, system=SYSTEM, n_tokens=1)
        assert (await think(links, replace(turn, prefill_only=True))).ids == []
    done = await think(links, greedy_turn(first, second, end, system=SYSTEM, n_tokens=N_TOKENS))
    heard = f"{tiny_cascade.HEARD} {tiny_cascade.HEARD}"
    prompt = model.prompt([("system", SYSTEM), ("user", heard)])
    assert done.ids == model.generate(prompt, N_TOKENS)
    # Of this turn, only the markup behind the words is new.
    assert not done.rebuilt and done.n_prompt - done.n_cached < 12
    links.close()


async def test_a_transcript_is_what_the_recogniser_heard(stages):
    links = stages.links("")
    turn = greedy_turn(user(SPEECH, "Transcribe."), system="", n_tokens=N_TOKENS)
    done = await think(links, replace(turn, stateless=True, transcribes=True))
    assert done.text == tiny_cascade.HEARD and done.ids == []


async def test_a_recogniser_that_fails_fails_the_turn_and_the_session_goes_on(stages, model):
    links = stages.links("broken")
    silent = np.zeros(64_000, np.int16)
    with pytest.raises(StageFailedError, match="the recogniser failed: broken"):
        await think(links, greedy_turn(user(silent), system=SYSTEM, n_tokens=4))
    done = await think(links, greedy_turn(user("why"), system=SYSTEM, n_tokens=N_TOKENS))
    prompt = model.prompt([("system", SYSTEM), ("user", "why")])
    assert done.ids == model.generate(prompt, N_TOKENS)
    links.close()


@pytest.mark.parametrize("must_call", ["set_timer", ""], ids=["named", "any"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_forced_call_fits_its_parameters_with_random_weights(
    stages, must_call, temperature
):
    links = stages.links(f"call-{must_call}-{temperature}")
    turn = replace(
        greedy_turn(user("set a timer"), system=SYSTEM, n_tokens=200),
        tools=Tools(functions=(SET_TIMER, HANG_UP), must_call=must_call),
        temperature=temperature,
    )
    done = await think(links, turn)
    assert done.finish == "stop"
    [call] = map(json.loads, done.function_calls)
    if call["name"] == "set_timer":
        assert call["arguments"].keys() == {"minutes", "sound"}
        assert 1 <= call["arguments"]["minutes"] <= 9
        assert call["arguments"]["sound"] in ("bell", None)
    else:
        assert must_call == "" and call == {"name": "hang_up", "arguments": {}}
    # The next response is free.
    turn = greedy_turn(user("why"), system=SYSTEM, n_tokens=4)
    assert (await think(links, turn)).function_calls == []
    links.close()


async def test_a_long_session_keeps_instructions_and_a_window(stages, model):
    links = stages.links("long")
    sink = len(model.prompt([("system", SYSTEM)])) - len(model.tokenizer.encode("assistant\n"))
    history: list[HistoryItem] = []
    n_dropped = await total(stages, "thinker", "policy_tokens_compacted")
    to_append = model.prompt([("system", SYSTEM), ("user", "question 0")])
    n_all = 0
    for n in range(6):
        history.append(user(f"question {n}"))
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=N_TOKENS)
        turn = replace(
            turn,
            retention=RetentionConfig(window_tokens=WINDOW, slack_tokens=SLACK),
            drops_oldest=True,
        )
        done = await think(links, turn)
        assert not done.rebuilt
        expected = model.generate(to_append, N_TOKENS)
        assert done.ids == expected, n
        history = [item for item in history if item.key not in done.gone]
        history.append(reply_of(turn, done))
        n_now = await total(stages, "thinker", "policy_tokens_compacted")
        if n_gone := round(n_now - n_dropped):
            model.drop(sink, sink + n_gone)
        n_dropped, n_all = n_now, n_all + n_gone
        text = f"<|im_end|>\n<|im_start|>user\nquestion {n + 1}<|im_end|>\n<|im_start|>assistant\n"
        to_append = [expected[-1], *model.tokenizer.encode(text, add_special_tokens=False)]
    assert n_all > WINDOW
    assert len(model.ids) <= sink + WINDOW + SLACK + 2 * N_TOKENS + 20
    links.close()


async def test_a_truncated_response_is_continued_from_the_heard_tokens(stages: Stages, model):
    links = stages.links("truncated")
    question, heard = user("tell me of it"), 9
    turn = greedy_turn(question, system=SYSTEM, n_tokens=N_TOKENS)
    whole = reply_of(turn, await think(links, turn))
    part = replace(whole, key="heard", token_ids=whole.token_ids[:heard])
    done = await think(
        links, greedy_turn(question, part, user("and then"), system=SYSTEM, n_tokens=N_TOKENS)
    )
    prompt = model.prompt([("system", SYSTEM), ("user", "tell me of it")])
    text = "<|im_end|>\n<|im_start|>user\nand then<|im_end|>\n<|im_start|>assistant\n"
    tail = model.tokenizer.encode(text, add_special_tokens=False)
    assert done.ids == model.generate([*prompt, *part.token_ids, *tail], N_TOKENS)
    assert not done.rebuilt and done.n_cached >= len(prompt) + heard - 1
    links.close()
