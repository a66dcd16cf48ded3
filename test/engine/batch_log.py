"""An engine's batches, step by step, from SGLang's log.

Run as a program: `python -m test.engine.batch_log CHECKPOINT [STAGE]`. With a stage, the engine has
that stage's seams with policies off; without one it is stock SGLang. The log goes to stderr, the
generated tokens go to stdout as one JSON line.
"""

import asyncio
import json
import os
import random
import re
import sys

# Times and rates differ between runs; the batches do not.
_COUNTS = re.compile(r"#?(new-seq|new-token|cached-token|running-req|queue-req|token): (\d+)")


def batches(log: str) -> list[tuple[str, ...]]:
    """("Prefill" | "Decode", counts …) of every batch in a log."""
    found = []
    for line in log.splitlines():
        if match := re.search(r"(Prefill|Decode) batch", line):
            found.append((match[1], *(f"{name}={n}" for name, n in _COUNTS.findall(line))))
    return found


async def generate(engine) -> list:
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 200) for _ in range(rng.randrange(5, 200))] for _ in range(12)]
    lengths = [rng.randrange(2, 60) for _ in prompts]
    # One message, so that all requests arrive in one round in both engines.
    responses = await engine.async_generate(
        input_ids=prompts,
        sampling_params=[
            {"max_new_tokens": n, "temperature": 0, "ignore_eos": True} for n in lengths
        ],
    )
    return [response["output_ids"] for response in responses]


async def after_a_pause(engine) -> list:
    """Requests arrive one by one, but none runs until all have arrived."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    tokenizer = engine.tokenizer_manager
    await engine.async_generate(
        input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 2, "temperature": 0}
    )
    # SGLang removes a finished request from its batch in a later round, and flushes only then.
    while not (await tokenizer.flush_cache()).success:
        await asyncio.sleep(0.05)
    await tokenizer.pause_generation(PauseGenerationReqInput(mode="in_place"))
    running = asyncio.create_task(generate(engine))
    await asyncio.sleep(1.0)
    await tokenizer.continue_generation(ContinueGenerationReqInput())
    responses = await running
    # The scheduler logs its last batch after the response has left, and is not to end before that.
    while not (await tokenizer.flush_cache()).success:
        await asyncio.sleep(0.05)
    return responses


def main() -> None:
    import sglang as sgl

    os.environ.pop("SGLANG_LIVE_STAGE", None)
    os.environ.pop("SGLANG_LIVE_POLICIES", None)
    if len(sys.argv) > 2:
        os.environ["SGLANG_LIVE_STAGE"] = sys.argv[2]
        os.environ["SGLANG_LIVE_POLICIES"] = ""
    engine = sgl.Engine(
        model_path=sys.argv[1],
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        mm_attention_backend="sdpa",
        enable_multimodal=True,
        enable_streaming_session=True,
        # So small that requests wait and some are retracted.
        max_total_tokens=900,
        max_running_requests=6,
        chunked_prefill_size=64,
        disable_overlap_schedule=True,
        log_level="info",
        decode_log_interval=1,
    )
    print(json.dumps(engine.loop.run_until_complete(after_a_pause(engine))), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
