"""Which numbers of tensor-parallel ranks a model's layers can be divided among. Without torch."""

from collections.abc import Mapping

from sglang_live.errors import BadInputError


def check_divided(flag: str, n_ranks: int, sizes: Mapping[str, int], n_kv_heads: int) -> None:
    """
    Args:
        flag: that sets the number of ranks, for the error.
        sizes: that have to be divided, by name.
        n_kv_heads: fewer than ranks are copied.
    Raises:
        BadInputError: names the flag, and a size that cannot be divided.
    """
    for name, size in sizes.items():
        if size % n_ranks:
            raise _undivided(flag, n_ranks, name, size)
    if n_kv_heads % n_ranks and n_ranks % n_kv_heads:
        raise _undivided(flag, n_ranks, "num_key_value_heads", n_kv_heads)


def check_number(flag: str, n_ranks: int) -> None:
    """Raises BadInputError if there would be no rank."""
    if n_ranks < 1:
        raise BadInputError(f"{flag} takes a number from 1, got {n_ranks}")


def _undivided(flag: str, n_ranks: int, name: str, size: int) -> BadInputError:
    return BadInputError(
        f"{flag}: this model's {name} is {size}, which cannot be divided among {n_ranks} ranks"
    )
