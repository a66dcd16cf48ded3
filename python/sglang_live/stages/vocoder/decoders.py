"""What the vocoder asks of a decoder of codes."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from sglang_live.policy.chunks import ChunkRule


class StreamDecoder(Protocol):
    """A codec decoder that carries left context as state; see StreamingCode2Wav.

    Attributes:
        n_tail_frames: frames of END_CODE behind the last one of a stream, which bring its last
            samples; 0 for a decoder that does not look ahead (see SnacDecoder).
        n_context_frames: on which the sound of the next one depends. None: on the whole stream.
    """

    n_quantizers: int
    n_tail_frames: int
    n_context_frames: int | None

    def new_stream(self) -> Any: ...

    def check_codes(self, codes: Tensor) -> None: ...

    def decode(self, streams: list[Any], codes: Tensor) -> Sequence[Tensor]:
        """[n_samples] of each stream, which may be none."""
        ...


class VoiceStream(Protocol):
    """
    Attributes:
        rule: of its chunks.
        n_frames: of its voice's prompt, and of the chunks so far: what the next one costs.
    """

    rule: ChunkRule
    n_frames: int


@runtime_checkable
class VoiceDecoder(Protocol):
    """A decoder whose streams have a voice, and whose sound depends on the chunks it is decoded in;
    see CosyVoiceDecoder.

    Attributes:
        voices: of which new_stream knows.
        n_quantizers, n_tail_frames: see StreamDecoder; the sound depends on the whole stream.
    """

    voices: tuple[str, ...]
    n_quantizers: int
    n_tail_frames: int

    def new_stream(self, voice: str, *speaker: np.ndarray) -> Any:
        """A VoiceStream.

        speaker: what the talker's stage made of a recording (VoiceMaker), for a decoder of a family
            that makes voices while it serves.
        Raises:
            BadInputError: there is no such voice.
        """
        ...

    def check_codes(self, codes: Tensor) -> None: ...

    def decode(self, streams: list[Any], codes: Sequence[Tensor]) -> Sequence[Tensor]:
        """[n_samples] of each stream, which may be none.

        codes: [n_frames, n_quantizers] of each stream: by its rule, but at its end.
        """
        ...
