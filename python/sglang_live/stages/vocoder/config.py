"""Settings of a vocoder. Without torch: the server checks its flags before any stage starts."""

from dataclasses import dataclass
from typing import Literal

from sglang_live.errors import BadInputError
from sglang_live.settings import Count, Settings, flag

Precision = Literal["float32", "tf32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderConfig(Settings):
    """How chunks are cut and batched: flags with the prefix `--vocoder.`."""

    max_streams: Count = flag(
        64,
        "responses decoded at once, per replica; one more fails",
        unset="the sum of max_running_requests, without its minimum: 128",
    )
    # Few, because the user waits.
    first_chunk_frames: Count = flag(
        2, "frames of 80 ms in a response's first chunk, and in each while little is left to hear"
    )
    # More, because each decode has a fixed cost.
    chunk_frames: Count = flag(4, "frames in every other chunk")
    flex_chunk_frames: Count = flag(
        48,
        "frames in every chunk of a flex response, while no chunk that is heard waits",
    )
    max_batch: Count = flag(16, "chunks per decode", unset="16; 4 without a GPU")
    # On a device that other stages use a decode waits for their work; several wait at once.
    max_in_flight: Count = flag(
        3, "decodes of different shapes that are launched before their results arrive"
    )
    max_buffered_frames: Count = flag(
        750, "frames of one response that may wait; 750 are a minute of speech"
    )
    disable_cuda_graph: bool = flag(False, "decode without CUDA graphs on a GPU, too")
    # The default is that of the publishers' own classes; CosyVoice's server for Triton has float16.
    precision: Precision = flag("float32", "of flow decoders; bfloat16 is fastest")

    def check(self) -> None:
        if self.max_buffered_frames < max(self.first_chunk_frames, self.chunk_frames):
            raise BadInputError(
                f"max_buffered_frames={self.max_buffered_frames} cannot hold one chunk"
            )
