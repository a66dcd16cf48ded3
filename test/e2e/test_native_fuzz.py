"""Random bodies for SGLang's own API, against a running engine: it survives and names errors.

A longer run: SGLANG_LIVE_FUZZ_BODIES=2000, and another one: SGLANG_LIVE_FUZZ_SEED=1.
"""

import asyncio
import os
import random
from collections import Counter

import httpx
import pytest

from test.e2e.conftest import Server

pytestmark = [pytest.mark.e2e]

_N_BODIES = int(os.environ.get("SGLANG_LIVE_FUZZ_BODIES", "150"))
_SEED = int(os.environ.get("SGLANG_LIVE_FUZZ_SEED", "7"))
_AT_ONCE = 8

_HOSTILE = (
    None, True, False, 0, -1, 1, 2, 20, 128, 2047, 2048, 999_999, 2**31, 2**63, -(2**31),
    0.0, 0.5, -0.5, 1e-300, 1e300, "", "x", "think-", "\x00", "é" * 40, "(a+)+$", ".*", "[", [],
    [[]], [-1], [5, 999_999], [[5], [6, -1]], [None], ["a", 1], [[[1]]], {}, {"a": 1},
    {"-1": 1}, {"5": 1e300}, {"2048": 1}, [{}], [True], ["x"] * 3, [0.5, 1],
)  # fmt: skip
_VALID = {
    "n": (1, 2), "stop": (".", ["a", "b"]), "stop_token_ids": ([5, 6],), "temperature": (0, 0.7, 2),
    "stop_regex": ("[.!?]", "a{1,4}b"), "top_p": (0.1, 1), "top_k": (-1, 1, 50), "min_p": (0, 1),
    "frequency_penalty": (-2, 1), "presence_penalty": (2,), "repetition_penalty": (0.01, 1.2, 2),
    "regex": ("[a-z]+", "(yes|no)"), "ebnf": ('root ::= "a" | "b"',), "ignore_eos": (True, False),
    "skip_special_tokens": (False,), "no_stop_trim": (True,),
    "logit_bias": ({"5": 100, "6": -100}, {"1023": 1.5}),
}  # fmt: skip
_SCHEMA = '{"type":"object","properties":{"a":{"type":"string","maxLength":9}}}'
_SAMPLING = _VALID | {
    "max_new_tokens": (0, 1, 4, 8), "min_new_tokens": (0, 1, 2), "json_schema": (_SCHEMA,),
    "structural_tag": ("{}",), "sampling_seed": (1,), "stream_interval": (1, 3),
    "spaces_between_special_tokens": (False,), "beam_width": (1,),
}  # fmt: skip
_GENERATE = {
    "rid": ("mine", ["a", "b"]), "text": ("hello", ["a", "b"]),
    "input_ids": ([5, 6, 7], [[5], [6, 7]], [1023], [5, 8, 9]), "return_logprob": (True, [True]),
    "logprob_start_len": (-1, 0, 1, 3, 30), "top_logprobs_num": (0, 3, 20, [1, 2]),
    "token_ids_logprob": ([5, 6], [[5], [6]]), "return_text_in_logprobs": (True,),
    "return_prompt_token_ids": (True,), "stream": (True, False),
    "audio_data": ("data:audio/wav;base64,UklGRg==",), 
    "session_params": ({"id": "fuzz"}, {"id": "fuzz", "replace": True},
                       {"id": "other", "rid": "x"}),
}  # fmt: skip
_OPENAI = _VALID | {
    "model": ("demo",), "min_tokens": (0, 2), "max_tokens": (1, 4, 8), "seed": (1,),
    "stream": (True, False), "stream_options": ({"include_usage": True},),
    "response_format": ({"type": "json_object"}, {"type": "text"}), "user": ("u",),
}  # fmt: skip
_COMPLETION = _OPENAI | {
    "prompt": ("hello", ["a", "b"], [5, 6], [[5], [6]]), "echo": (True,), "logprobs": (0, 3, 20),
    "best_of": (1,), "return_token_ids": (True,),
}  # fmt: skip
_CHAT = _OPENAI | {
    "messages": ([{"role": "user", "content": "hello"}], [{"role": "assistant"}],
                 [{"role": "user", "content": [{"type": "text", "text": "<|audio_pad|>"}]}]),
    "logprobs": (True,), "top_logprobs": (0, 5), "tool_choice": ("auto", "required"),
    "tools": ([{"type": "function", "function": {"name": "f", "parameters": {}}}],),
    "chat_template_kwargs": ({"enable_thinking": False}, {"chat_template": "{{1}}"}),
    "reasoning_effort": ("low",), "continue_final_message": (True,), "max_completion_tokens": (4,),
}  # fmt: skip
_FORBIDDEN = {
    "priority": 1, "cache_salt": "a", "lora_path": "x", "image_data": "data:,x", "lora_id": "x",
    "input_embeds": [[0.1]], "return_hidden_states": True, "kv_hints": {}, "bootstrap_room": 1,
    "routed_dp_rank": 1, "extra_key": "x", "mm_hashes": ["a"], "custom_logit_processor": "x",
    "positional_embed_overrides": {}, "token_indices_to_pool": [[9]], "session_id": "x",
    "multi_item_delimiter_indices": [[1]], "return_sampling_mask": True, "video_data": "data:,x",
    "return_flat_raw_top_logprobs": True, "background": True, "return_routed_experts": True,
}  # fmt: skip
_ROUTES = {
    "/generate": (_GENERATE, ("text", "input_ids")),
    "/v1/completions": (_COMPLETION, ("prompt",)),
    "/v1/chat/completions": (_CHAT, ("messages",)),
    "/v1/tokenize": ({"prompt": ("a", ["b"]), "messages": _CHAT["messages"]}, ("prompt",)),
    "/v1/detokenize": ({"tokens": ([5], [[5], [6]]), "model": ("demo",)}, ("tokens",)),
    "/open_session": ({"capacity_of_str_len": (1, 1000), "session_id": ("fuzz", "other"),
                       "streaming": (True, False), "timeout": (1, 0.5, 60)},
                      ("capacity_of_str_len", "session_id")),
    "/close_session": ({"session_id": ("fuzz", "other")}, ("session_id",)),
    "/abort_request": ({"rid": ("mine", ""), "abort_all": (True, False)}, ("rid",)),
}  # fmt: skip
_WEIGHTS = (12, 6, 6, 1, 1, 2, 1, 1)


def drawn_body(draw: random.Random) -> tuple[str, object]:
    """A route and a body of SGLang's fields, each with a usual or a hostile value."""
    route = draw.choices(list(_ROUTES), _WEIGHTS)[0]
    known, likely = _ROUTES[route]
    if draw.random() < 0.02:
        return route, draw.choice(_HOSTILE)
    hostility = draw.choice((0.0, 0.0, 0.05, 0.2))
    some = draw.sample(list(known), min(len(known), draw.randint(0, 4)))
    names = {draw.choice(likely), *some} if len(likely) < 3 else set(some)
    body = {name: _value(draw, known[name], hostility) for name in sorted(names)}
    if draw.random() < 0.1:
        name = draw.choice(list(_FORBIDDEN))
        body[name] = _FORBIDDEN[name]
    if route == "/generate":
        body.pop("input_ids" if "text" in body and draw.random() < 0.95 else "", None)
        some = draw.sample(list(_SAMPLING), draw.randint(0, 4))
        params = {name: _value(draw, _SAMPLING[name], hostility) for name in some}
        body["sampling_params"] = {"max_new_tokens": 4} | params
    elif route.startswith("/v1/c"):
        body.setdefault("max_tokens", 4)
    return route, body


def _value(draw: random.Random, usual: tuple, hostility: float) -> object:
    return draw.choice(_HOSTILE if draw.random() < hostility else usual)


async def sent_and_answered(server: Server, n_bodies: int, seed: int, key: str = "") -> Counter:
    """Send n_bodies and wait for all responses. Returns statuses by route."""
    draw, seen = random.Random(seed), Counter()
    bodies = iter([drawn_body(draw) for _ in range(n_bodies)])
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def send_some(http: httpx.AsyncClient) -> None:
        for route, body in bodies:
            answer = await http.post(route, json=body)
            seen[route, answer.status_code] += 1
            is_said = answer.status_code < 500 or (route, answer.status_code) == (
                "/open_session",
                503,
            )
            assert is_said, (route, body, answer.status_code, answer.text[:400])

    async with (
        httpx.AsyncClient(base_url=server.http, timeout=60, headers=headers) as http,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(_AT_ONCE):
            group.create_task(send_some(http))
    return seen


async def test_an_engine_survives_all_drawn_bodies(server):
    before = server.stage_starts()
    seen = await sent_and_answered(server, _N_BODIES, _SEED)
    print(dict(sorted(seen.items())))
    assert seen.total() == _N_BODIES
    assert server.stage_starts() == before
    assert server.is_healthy()
