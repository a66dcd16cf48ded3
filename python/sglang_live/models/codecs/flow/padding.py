"""To which numbers of streams and codes the batches of a flow are padded in its graphs.

Without torch: the device model of benchmark/speaking_models.py pads likewise.
"""

# Pairs of codes of a batch, with those that are padded, and codes of its longest stream: attention
# to places in the encoder takes most memory, about 1 GB in half precision, as without graphs.
MOST_PAIRS, LONGEST_CODES = 16 * 512**2, 1024
LEAST_STEP = 32  # of codes


def padded_codes(n: int) -> int:
    """At most an eighth more, or 31."""
    step = max(LEAST_STEP, 1 << max(0, n.bit_length() - 4))
    return -(-n // step) * step


def padded_streams(n: int, most: int) -> int:
    """Powers of two, halfway between, and the most. n: at most `most`."""
    power = 1 << (n - 1).bit_length()
    return min(power if 4 * n > 3 * power else 3 * power // 4, most)


def padded_shape(n: int, longest: int, most: int) -> tuple[int, int] | None:
    """Streams and codes; None: beyond what is captured."""
    if n > most or longest > LONGEST_CODES:
        return None
    n_streams, n_codes = padded_streams(n, most), padded_codes(longest)
    return (n_streams, n_codes) if n_streams * n_codes**2 <= MOST_PAIRS else None
