"""Function calls of a running server, with drawn schemas: each response ends, each call fits.

    python -m test.e2e.forced_calls --url http://127.0.0.1:30000 --n 500 --seed 1

A case is a schema, a tool_choice, a modality, with or without a token limit, over the realtime API
or chat completions, streamed or not. Prints what falls short, and how many cases there were.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import websockets
from jsonschema import Draft202012Validator

from sglang_live.models.grammars.call_grammar import MAX_CALL_TOKENS
from sglang_live.stages.thinker.request import MAX_RESPONSE_TOKENS
from test.drawn_schemas import SchemaMaker

CHOICES = ("required", "named", "none", "auto")
ROUTES = ("realtime", "realtime", "chat", "streamed chat")
LIMITS = (None, None, 48, 200)
# Tokens of the beginning of a call, which the server writes.
_OPENING_TOKENS = 40
# A response ends within them and its tokens, on a machine that does nothing else: two cores make
# eight tokens a second for four responses of the cascade.
_ENDS_IN_S = 60
_TOKENS_PER_S = 2


@dataclass(frozen=True, slots=True)
class Case:
    seed: int
    function: dict[str, Any]
    choice: str
    route: str
    modality: str
    limit: int | None

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def most_tokens(self) -> int:
        most = MAX_CALL_TOKENS if self.forced else MAX_RESPONSE_TOKENS
        return (self.limit or most) + _OPENING_TOKENS

    @property
    def ends_in_s(self) -> float:
        return _ENDS_IN_S + self.most_tokens / _TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Ending:
    """status: "completed", "incomplete", "refused", or what else the server said."""

    status: str
    calls: tuple[tuple[str, str], ...] = ()
    n_tokens: int = 0


def case_of(seed: int) -> Case:
    draw = random.Random(seed)
    function = SchemaMaker(seed).function(f"f_{seed}")
    return Case(
        seed,
        function,
        draw.choice(CHOICES),
        draw.choice(ROUTES),
        draw.choice(("text", "audio")),
        draw.choice(LIMITS),
    )


def fault_of(case: Case, end: Ending) -> str | None:
    """What is wrong with the ending of a case."""
    if end.status == "refused":
        return None if case.forced else "refused without a forced call"
    if end.status not in ("completed", "incomplete"):
        return end.status
    if end.n_tokens > case.most_tokens:
        return f"{end.n_tokens} tokens"
    if case.choice == "none" and end.calls:
        return "a call in spite of none"
    if case.forced and end.status == "completed" and not end.calls:
        return "no call"
    validator = Draft202012Validator(case.function.get("parameters") or {"type": "object"})
    for name, arguments in end.calls:
        if name != case.function["name"]:
            return f"a call of {name}"
        fault = next(validator.iter_errors(json.loads(arguments)), None)
        if fault is not None:
            return f"{arguments[:200]}: {fault.message[:200]}"
    return None


async def end_of(case: Case, url: str, model: str) -> Ending:
    if case.route == "realtime":
        return await _realtime(case, url)
    return await _chat(case, url, model)


async def _realtime(case: Case, url: str) -> Ending:
    address = url.replace("http", "ws", 1) + "/v1/realtime"
    async with websockets.connect(address, max_size=None) as socket:

        async def until(*kinds: str) -> dict[str, Any]:
            while (event := json.loads(await socket.recv()))["type"] not in kinds:
                pass
            return event

        session = {
            "type": "realtime",
            "output_modalities": [case.modality],
            "tools": [case.function],
        }
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        event = await until("session.updated", "error")
        if event["type"] == "error":
            return Ending(f"schema refused: {event['error']['message']}")
        content = [{"type": "input_text", "text": "What is the weather in Paris?"}]
        item = {"type": "message", "role": "user", "content": content}
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        choice: Any = case.choice
        if choice == "named":
            choice = {"type": "function", "name": case.function["name"]}
        response = {"tool_choice": choice, "max_output_tokens": case.limit or "inf"}
        await socket.send(json.dumps({"type": "response.create", "response": response}))
        event = await until("response.done", "error")
        if event["type"] == "error":
            error = event["error"]
            is_ours = error["type"] == "invalid_request_error"
            return Ending("refused" if is_ours else f"error: {error['message']}")
        done = event["response"]
        calls = [one for one in done["output"] if one["type"] == "function_call"]
        status = done["status"]
        if status == "failed":
            status = f"failed: {done['status_details']}"
        return Ending(
            status,
            tuple((call["name"], call["arguments"]) for call in calls),
            done["usage"]["output_token_details"]["text_tokens"] if done["usage"] else 0,
        )


async def _chat(case: Case, url: str, model: str) -> Ending:
    function = {key: value for key, value in case.function.items() if key != "type"}
    choice: Any = case.choice
    if choice == "named":
        choice = {"type": "function", "function": {"name": function["name"]}}
    streamed = case.route == "streamed chat"
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
        "stream": streamed,
    }
    if streamed:
        body["stream_options"] = {"include_usage": True}
    if case.modality == "audio":
        body |= {"modalities": ["text", "audio"]}
        body["audio"] = {"format": "pcm16" if streamed else "wav", "voice": "alloy"}
    # A text completion has no limit of its own but the model's context.
    if case.limit is not None or not case.forced:
        body["max_completion_tokens"] = case.limit or MAX_RESPONSE_TOKENS
    async with httpx.AsyncClient(timeout=case.ends_in_s) as client:
        response = await client.post(f"{url}/v1/chat/completions", json=body)
    if response.status_code == 400:
        return Ending("refused")
    if response.status_code != 200:
        return Ending(f"status {response.status_code}: {response.text[:200]}")
    return _streamed_end(response.text) if streamed else _whole_end(response.json())


def _whole_end(body: dict[str, Any]) -> Ending:
    [choice] = body["choices"]
    made = choice["message"].get("tool_calls") or ()
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in made)
    return Ending(_status(choice["finish_reason"]), calls, _text_tokens(body["usage"]))


def _streamed_end(text: str) -> Ending:
    calls: dict[int, list[str]] = {}
    reason, n_tokens = "no end", 0
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return Ending(f"error: {chunk['error']}")
        n_tokens = _text_tokens(chunk["usage"]) if chunk.get("usage") else n_tokens
        for choice in chunk["choices"]:
            reason = choice.get("finish_reason") or reason
            for call in choice["delta"].get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
    status = _status(reason)
    # What a limit cut in the middle of a stream cannot be taken back.
    made = calls.values() if status == "completed" else ()
    return Ending(status, tuple((name, arguments) for name, arguments in made), n_tokens)


def _status(reason: str) -> str:
    return {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}.get(
        reason, f"finish_reason {reason}"
    )


def _text_tokens(usage: dict[str, Any]) -> int:
    details = usage.get("completion_tokens_details") or {}
    return details.get("text_tokens") or usage["completion_tokens"]


async def run(
    url: str, seeds: list[int], at_once: int, within_s: float = 3600
) -> tuple[Counter[str], list[str]]:
    """Outcomes by choice, route, modality and limit, and what falls short."""
    async with httpx.AsyncClient() as client:
        model = (await client.get(f"{url}/v1/models")).json()["data"][0]["id"]
    left, counts, faults = list(reversed(seeds)), Counter[str](), list[str]()
    until_s = time.monotonic() + within_s

    async def work() -> None:
        while left and time.monotonic() < until_s:
            case = case_of(left.pop())
            begun_s = time.monotonic()
            try:
                end = await asyncio.wait_for(end_of(case, url, model), case.ends_in_s)
            except (TimeoutError, httpx.HTTPError, websockets.WebSocketException) as error:
                end = Ending(f"no end: {error!r}")
            limit = "limit" if case.limit else "no limit"
            kind = f"{case.choice} {case.modality} {limit}"
            counts[f"{kind} {end.status.partition(':')[0]}"] += 1
            if fault := fault_of(case, end):
                took_s = time.monotonic() - begun_s
                faults.append(
                    f"seed {case.seed} {case.route} {kind} {took_s:.0f} s: {fault} "
                    f"{json.dumps(case.function.get('parameters'))[:400]}"
                )
                print(faults[-1], flush=True)

    await asyncio.gather(*(work() for _ in range(at_once)))
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--n", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600, help="begin no case after them")
    args = parser.parse_args()
    seeds = list(range(args.seed, args.seed + args.n))
    counts, faults = asyncio.run(run(args.url.rstrip("/"), seeds, args.at_once, args.seconds))
    for kind, n in sorted(counts.items()):
        print(f"{n:5d} {kind}")
    print(f"{sum(counts.values())} cases, {len(faults)} fall short")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
