"""Links of a chained Ogg file: whole files behind one another, as recorders and radios write them.

libsndfile reads the first one and says nothing of the others. Source: RFC 3533, section 4 and 6.
"""

_HEADER_BYTES = 27
_BEGINS = 0x02  # of a logical stream


def links(data: bytes) -> list[bytes]:
    """The links of an Ogg file, each a file by itself. Where pages cannot be followed to the end,
    the last link has what is left."""
    starts: list[int] = []
    at, has_begun = 0, False
    while at + _HEADER_BYTES <= len(data) and data[at : at + 4] == b"OggS":
        flags, n_segments = data[at + 5], data[at + 26]
        # Streams of one link begin together: a beginning behind other pages is another link.
        begins = bool(flags & _BEGINS)
        if begins and not has_begun:
            starts.append(at)
        has_begun = begins
        lacing = data[at + _HEADER_BYTES : at + _HEADER_BYTES + n_segments]
        at += _HEADER_BYTES + n_segments + sum(lacing)
    starts = starts or [0]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
