"""Conversion of a feed message into the model's record of a request."""

import numpy as np

from sglang_live.engine_channel.messages import TalkerPrompt
from sglang_live.models.qwen3_omni.talker_state import TalkerStream


def stream_of(prompt: TalkerPrompt) -> TalkerStream:
    at = np.asarray(prompt.audio_at, dtype=np.int64)
    rows = None
    if len(at):
        rows = np.frombuffer(prompt.audio, dtype=np.float32).reshape(len(at), -1).copy()
    return TalkerStream(
        rid=prompt.rid,
        prompt_len=prompt.prompt_len,
        audio_rows=rows,
        audio_at=at,
        seed=prompt.seed,
        greedy=prompt.greedy,
        temperature=prompt.temperature,
        penalty=prompt.penalty,
    )
