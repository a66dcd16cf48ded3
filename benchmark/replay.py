"""Time in which a client that reconnects replays its conversation and gets a response.

    python -m benchmark.replay --url ws://127.0.0.1:30000/v1/realtime --items 1000 --json out.json

In: a running server. Out: one JSON object, seconds.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import websockets


async def replay(url: str, n_items: int) -> dict:
    """Replay n_items and run a turn.

    Returns replayed_s, until the last item is confirmed, and answered_s, of a small turn after it.
    """
    async with websockets.connect(url, max_size=None, proxy=None) as connection:
        deleted = 0

        async def send(kind: str, **fields) -> None:
            await connection.send(json.dumps({"type": kind, **fields}))

        async def until(kind: str, n: int = 1) -> dict:
            nonlocal deleted
            while True:
                event = json.loads(await connection.recv())
                deleted += event["type"] == "conversation.item.deleted"
                if event["type"] == "error":
                    raise RuntimeError(event["error"])
                n -= event["type"] == kind
                if not n:
                    return event

        await until("session.created")
        session = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
        await send("session.update", session=session)
        await until("session.updated")
        began_s = time.perf_counter()
        for n in range(n_items):
            role, kind = ("assistant", "output_text") if n % 2 else ("user", "input_text")
            part = {"type": kind, "text": f"This is message {n} of a long conversation."}
            item = {"type": "message", "role": role, "content": [part]}
            await send("conversation.item.create", item=item)
        await until("conversation.item.done", n_items)
        replayed_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        response = {"output_modalities": ["text"], "max_output_tokens": 8}
        await send("response.create", response=response)
        done = (await until("response.done"))["response"]
        return {
            "items": n_items,
            "replayed_s": round(replayed_s, 3),
            "answered_s": round(time.perf_counter() - began_s, 3),
            "status": done["status"],
            "usage": done["usage"],
        }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--url", required=True)
    p.add_argument("--items", type=int, default=1000)
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    result = asyncio.run(replay(args.url, args.items))
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result) + "\n", "utf-8")


if __name__ == "__main__":
    main()
