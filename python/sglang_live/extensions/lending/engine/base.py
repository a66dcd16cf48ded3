"""What memory has that several processes map, wherever it is."""

from abc import ABC, abstractmethod

from torch import Tensor


class SharedMemory(ABC):
    """
    Attributes:
        raw: uint8 [n_bytes], on the device.
        fd: to pass to other processes; -1 for memory that another process has created.
    """

    raw: Tensor
    fd: int = -1

    @property
    def n_bytes(self) -> int:
        return self.raw.numel()

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Memory of the system, or of the GPU, that it takes."""

    @abstractmethod
    def clear(self) -> None:
        """Fill with zeros. Returns when all processes read them."""

    @abstractmethod
    def close(self) -> None:
        """Unmap, when the device no longer uses it. No tensor of it may be used any more."""
