"""Stock SGLang, without any seam of ours, through the fault that session_rejects_cleanly mends.

Run as a program: `python -m test.engine.stock_fault CHECKPOINT`. Prints one JSON line.
"""

import asyncio
import json
import os
import sys


async def third_turn_beside_a_running_one(engine) -> dict:
    session = engine.tokenizer_manager

    async def turn(first_id: int, n_tokens: int) -> dict | str:
        try:
            return await engine.async_generate(
                input_ids=list(range(first_id, first_id + 20)),
                sampling_params={"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True},
                session_params={"id": session_id},
            )
        except ValueError as error:
            return str(error)

    from sglang.srt.managers.io_struct import OpenSessionReqInput

    request = OpenSessionReqInput(capacity_of_str_len=1 << 20, streaming=True)
    session_id = await session.open_session(request, None)
    await turn(100, 4)
    running = asyncio.create_task(turn(200, 400))
    await asyncio.sleep(0.3)
    second = await turn(300, 4)
    third = await turn(400, 4)
    running.cancel()
    return {
        "second_refused": isinstance(second, str),
        "third_admitted": isinstance(third, dict),
    }


def main() -> None:
    import sglang as sgl

    os.environ.pop("SGLANG_LIVE_STAGE", None)
    engine = sgl.Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        mm_attention_backend="sdpa",
        enable_multimodal=True,
        enable_streaming_session=True,
        max_total_tokens=8192,
        max_running_requests=8,
        log_level="error",
    )
    result = engine.loop.run_until_complete(third_turn_beside_a_running_one(engine))
    print(json.dumps(result), flush=True)
    # The pools are not to be trusted any more: no orderly end.
    engine.shutdown()


if __name__ == "__main__":
    main()
