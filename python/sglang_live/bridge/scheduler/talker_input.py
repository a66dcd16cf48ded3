"""What feed messages bring for the talker's model: records of requests, and audio states."""

import numpy as np
import torch
from torch import Tensor

from sglang_live.engine_channel.states import to_tensor
from sglang_live.messages import ForgetStates, TalkerPrompt, TalkerStates
from sglang_live.models.speech_lm.talker_state import AudioStates, TalkerStream


class PromptStates:
    """The thinker's states of user messages, for the prompts that refer to them.

    The stage decides what is kept (stages/talker/segments.py).
    """

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}

    def take(self, message: TalkerStates) -> None:
        rows = np.frombuffer(message.rows, message.dtype).reshape(message.n_rows, -1)
        self._states[message.id] = to_tensor(rows)

    def forget(self, message: ForgetStates) -> None:
        for states_id in message.ids:
            del self._states[states_id]

    def stream_of(self, prompt: TalkerPrompt) -> TalkerStream:
        """Convert an announcement into the model's record of its request."""
        at = np.asarray(prompt.audio_at, dtype=np.int64)
        audio = AudioStates([self._states[i] for i in prompt.states]) if prompt.states else None
        n_rows = audio.n_rows if audio is not None else 0
        assert n_rows == len(at), f"{n_rows} states for {len(at)} positions"
        return TalkerStream(
            rid=prompt.rid,
            prompt_len=prompt.prompt_len,
            audio=audio,
            audio_at=at,
            seed=prompt.seed,
            greedy=prompt.greedy,
            temperature=prompt.temperature,
            penalty=prompt.penalty,
            least_frames=prompt.least_frames,
            n_frames=prompt.n_frames,
            begun=begun_codes(prompt),
            pictures=tuple(prompt.pictures),
            block=prompt.block,
        )


def begun_codes(prompt: TalkerPrompt) -> Tensor | None:
    """[n_frames, n_codes] int16, that another engine has made. None: there are none."""
    if not prompt.n_frames:
        return None
    codes = np.frombuffer(prompt.codes, "<i2").reshape(prompt.n_frames, -1)
    return torch.from_numpy(codes.astype(np.int16))
