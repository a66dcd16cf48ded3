"""Settings of a vocoder. Without torch: the server checks its flags before any stage starts."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderConfig:
    """How chunks are cut and batched.

    Attributes:
        max_streams: jobs open at once.
        first_chunk_frames: frames of a job's first chunks; few, because the user waits.
        n_first_chunks: number of first chunks. Behind fewer than three, a chunk of normal size has
            to be made while the little audio of the ones before it plays: on a busy device that was
            where most gaps were.
        chunk_frames: frames of every later chunk; more, because each decode has a fixed cost.
        flex_chunk_frames: frames of every chunk of a flex job, at most max_buffered_frames.
        max_batch: chunks per decode.
        max_in_flight: decodes of different shapes that are launched before their results arrive. On
            a device that other stages use a decode waits for their work; several wait at once.
        max_buffered_frames: frames of one job that may wait; 750 are a minute of speech.
        disable_cuda_graph: decode without graphs on a GPU, too.
    """

    max_streams: int = 64
    first_chunk_frames: int = 2
    n_first_chunks: int = 3
    chunk_frames: int = 4
    flex_chunk_frames: int = 48
    max_batch: int = 16
    max_in_flight: int = 3
    max_buffered_frames: int = 750
    disable_cuda_graph: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.max_buffered_frames < max(self.first_chunk_frames, self.chunk_frames):
            raise ValueError(
                f"max_buffered_frames={self.max_buffered_frames} cannot hold one chunk"
            )
