"""Codec frames out of the talker's engine, on SGLang's own sampling-observer path.

Frames are sent after their step's token was committed and before the output is streamed, so a
frame that reaches the vocoder is final.
"""

from torch import Tensor

from sglang_live.engine_channel.inbox import Outbox
from sglang_live.messages import Frames
from sglang_live.models.speech_lm.talker_state import TalkerStream

# In frame_codes, of a step that has none.
NO_FRAME = -1


class CodesObserver:
    """Installed as ModelRunner.sampling_observer of the talker."""

    def __init__(self, model, outbox: Outbox):
        self._model = model
        self._outbox = outbox

    def is_active(self, sampling_info) -> bool:
        return True

    def before_grammar(self, logits: Tensor, sampling_info) -> Tensor:
        # The next step writes its codes into the same buffer, behind this copy on the same stream.
        return self._model.frame_codes[: logits.shape[0]].clone()

    def after_sample(self, state: Tensor, token_ids: Tensor) -> "_DeviceFrames":
        return _DeviceFrames(state, self._outbox, self._model)


class _DeviceFrames:
    def __init__(self, codes: Tensor, outbox: Outbox, model):
        self._codes = codes
        self._outbox = outbox
        self._model = model

    def copy_to_host(self, copy) -> "_HostFrames":
        return _HostFrames(copy(self._codes), self._outbox, self._model)


class _HostFrames:
    def __init__(self, codes: Tensor, outbox: Outbox, model):
        self._codes = codes
        self._outbox = outbox
        self._streams: dict[str, TalkerStream] = model.streams
        self._lag: int = model.frame_lag

    def consume(self, batch, commits) -> None:
        """Send the frame that each committed token completed: its own, or one before it."""
        rids, index, codes = [], [], []
        for req, commit, row in zip(batch.reqs, commits, self._codes.tolist(), strict=True):
            if commit is not None and row[0] != NO_FRAME:
                stream = self._streams.get(req.rid)
                rids.append(req.rid)
                index.append(commit.output_index - self._lag + (stream.n_dropped if stream else 0))
                codes.append(row)
        if rids:
            self._outbox.send(Frames(rids, index, codes))
