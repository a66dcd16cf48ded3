"""A simulated vocoder stage: its jobs, and the sound of their chunks."""

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.extensions.planner.simulation.engine.vocoder import Decoding, Vocoder
from sglang_live.extensions.planner.simulation.server.link import SimulatedStage, StageJob
from sglang_live.messages import (
    AnyMessage,
    Opener,
    Pcm,
    SoundPlace,
    VocoderDone,
    VocoderEnd,
    VocoderFrames,
    VocoderRequest,
)
from sglang_live.policy.view import FRAME_S

# A response lacks the first column of each upsampling convolution (models/qwen3_omni/code2wav.py,
# strides 8, 5, 4 and 3): 555 samples at 24 kHz, of its first chunk.
MISSING_SAMPLES = 8 * 60 + 5 * 12 + 4 * 3 + 3
MISSING_S = MISSING_SAMPLES / OUTPUT_RATE_HZ
_FRAME_BYTES = 2 * round(FRAME_S * OUTPUT_RATE_HZ)


class VocoderJob(StageJob):
    def __init__(self, stage: "SimulatedVocoder", request: VocoderRequest):
        super().__init__(stage, request)
        self._vocoder = stage.vocoder
        self._n_sent = 0 if request.sent is None else request.sent.n_done
        self._n_done = 0
        self._decoding = Decoding(self._emit, self._ended)

    def take(self, message: AnyMessage) -> None:
        match message:
            case VocoderFrames():
                self._vocoder.feed(self._decoding, 1)
            case VocoderEnd():
                self._vocoder.end(self._decoding)

    def cancel(self) -> None:
        self._vocoder.cancel(self._decoding)

    def _emit(self, n_frames: int) -> None:
        """Frames whose sound another vocoder has sent are decoded again, without being sent."""
        is_first = not self._n_done
        n_new = min(n_frames, self._n_done + n_frames - self._n_sent)
        self._n_done += n_frames
        if n_new > 0:
            n_bytes = n_new * _FRAME_BYTES - (2 * MISSING_SAMPLES if is_first else 0)
            self.send(Pcm(self.job_id, bytes(n_bytes), place=SoundPlace(n_done=self._n_done)))

    def _ended(self) -> None:
        self.end(VocoderDone(self.job_id))


class SimulatedVocoder(SimulatedStage):
    def __init__(self, name: str, vocoder: Vocoder):
        super().__init__(name)
        self.vocoder = vocoder

    def begin(self, opener: Opener) -> StageJob:
        assert isinstance(opener, VocoderRequest), "no other work is simulated"
        return VocoderJob(self, opener)

    def die(self) -> None:
        super().die()
        self.vocoder.stop()
