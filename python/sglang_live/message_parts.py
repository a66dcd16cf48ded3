"""What messages between orchestrator and stages carry: conversation items and tensors.

Tensors travel beside a message: a TensorRef says where (stages/transport/wire.py).
"""

import msgspec


class TensorRef(msgspec.Struct, frozen=True):
    """
    dtype: as numpy writes it, little-endian.
    frame: index among the raw frames behind the message. -1: the tensor is in shared memory.
    shm: name of a file in shared memory. "": the tensor is in a frame.
    """

    dtype: str
    shape: list[int]
    frame: int = -1
    shm: str = ""


class WireText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class WireAudio(msgspec.Struct, frozen=True, tag="audio"):
    """pcm: int16 mono at 16 kHz."""

    pcm: TensorRef


class WireItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A HistoryItem of core.py."""

    key: str
    role: str
    parts: list[WireText | WireAudio]
    token_ids: list[int] | None = None
    opens: bool = True
    closes: bool = True


class WireSegment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A UserSegment, as the talker receives it."""

    key: str
    token_ids: list[int]
    states: TensorRef | None = None
