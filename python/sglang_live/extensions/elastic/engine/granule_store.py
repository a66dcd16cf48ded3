"""Memory in granules, wherever it is: the pieces in which KV pools exchange it.

In: runs of granules (granules.py), and files that stand for them in messages. Out: mappings in
reserved address space. Owner: one GranuleStore per ElasticMemory; its thread maps, one at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from sglang_live.extensions.elastic.granules import Run


class GranuleStore(ABC):
    """What this process has of its own granules, and of those that it has received.

    All methods that change something raise OSError if the system refuses it.

    Attributes:
        granule_bytes: of one granule; mappings begin and end at multiples of it.
        most_passed: granules whose files fit into one message.
        place: of the memory. Only pools of the same place can exchange it.
    """

    granule_bytes: int
    most_passed: int
    place: str

    @abstractmethod
    def create(self, n: int) -> Run:
        """New granules, which read as zeros when they are mapped."""

    @abstractmethod
    def accept(self, runs: Sequence[Run], files: Sequence[int]) -> None:
        """Take granules of another process over. Closes the files.

        Raises:
            ValueError: files are missing. Nothing has changed.
        """

    @abstractmethod
    def files_of(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """New files for a message, of at most `most_passed` granules. They have to be closed."""

    @abstractmethod
    def keep(self, runs: Sequence[Run]) -> None:
        """Forget all granules of other processes but these, and own ones that were passed on."""

    @abstractmethod
    def free_away(self, kept: Sequence[Run]) -> None:
        """Free what another process, which has ended, had of this one's granules: all but these."""

    @abstractmethod
    def reserve(self, n_bytes: int) -> int:
        """Address space. Returns its address. Once."""

    @abstractmethod
    def tensor(self, address: int, n_bytes: int) -> Tensor:
        """uint8 [n_bytes], of which only what is mapped may be used."""

    @abstractmethod
    def map(self, address: int, runs: Iterable[Run]) -> None:
        """Map granules one behind the other."""

    @abstractmethod
    def unmap(self, address: int, n_bytes: int) -> None:
        """Whatever is mapped there."""

    @abstractmethod
    def unmap_wiped(self, address: int, runs: Sequence[Run]) -> None:
        """Unmap these granules, which map() has mapped there, and fill them with zeros. Waits until
        the device no longer uses them.
        """

    @abstractmethod
    def close(self) -> None:
        """Unmap everything and forget it. No tensor may be used any more."""

    def use_in_thread(self) -> None:  # noqa: B027, a CPU needs nothing
        """To be called first in a thread that calls the other methods."""
