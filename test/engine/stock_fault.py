"""Stock SGLang, without seams, in the faults that seams repair.

Run as a program: `python -m test.engine.stock_fault FAULT CHECKPOINT`. Prints one JSON line.
"""

import asyncio
import json
import os
import sys


class Session:
    """A streaming session of an engine."""

    def __init__(self, engine, session_id: str):
        self._engine, self._id = engine, session_id

    @classmethod
    async def open(cls, engine) -> "Session":
        from sglang.srt.managers.io_struct import OpenSessionReqInput

        request = OpenSessionReqInput(capacity_of_str_len=1 << 20, streaming=True)
        return cls(engine, await engine.tokenizer_manager.open_session(request, None))

    async def turn(self, first_id: int, n_tokens: int) -> dict | str:
        """Run a turn. Returns its response, or the error's text."""
        try:
            return await self._engine.async_generate(
                input_ids=list(range(first_id, first_id + 20)),
                sampling_params=_sampling(n_tokens),
                session_params={"id": self._id},
            )
        except ValueError as error:
            return str(error)


def _sampling(n_tokens: int) -> dict:
    return {"max_new_tokens": n_tokens, "temperature": 0, "ignore_eos": True}


async def third_turn_beside_a_running_one(engine) -> dict:
    session = await Session.open(engine)
    await session.turn(100, 4)
    running = asyncio.create_task(session.turn(200, 400))
    await asyncio.sleep(0.3)
    second = await session.turn(300, 4)
    third = await session.turn(400, 4)
    running.cancel()
    return {
        "second_refused": isinstance(second, str),
        "third_admitted": isinstance(third, dict),
    }


FAULTS = {"third-turn": third_turn_beside_a_running_one}
MAX_RUNNING = 2


def main() -> None:
    import sglang as sgl

    os.environ.pop("SGLANG_LIVE_STAGE", None)
    engine = sgl.Engine(
        model_path=sys.argv[2],
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        mm_attention_backend="sdpa",
        enable_multimodal=True,
        enable_streaming_session=True,
        max_total_tokens=8192,
        max_running_requests=MAX_RUNNING,
        log_level="error",
    )
    result = engine.loop.run_until_complete(FAULTS[sys.argv[1]](engine))
    print(json.dumps(result), flush=True)
    # The pools are inconsistent now: no orderly end.
    engine.shutdown()


if __name__ == "__main__":
    main()
