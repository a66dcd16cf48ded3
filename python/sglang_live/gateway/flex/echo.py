"""Writes the tier into responses of SGLang, which knows none on these routes.

In: pieces of a response as they come. Out: the same with `service_tier` in its object, or in each
object of a stream; nothing else changes. A line is passed on when it is complete.
"""

_DATA = b"data: {"
_ERROR = b'data: {"error"'


class TierEcho:
    """
    served: the tier.
    streams: whether the response is a stream of server-sent events.
    """

    def __init__(self, served: str, streams: bool):
        self._field = b'"service_tier":"%s",' % served.encode()
        self._streams = streams
        self._rest = b""  # of a line that is not complete, or of a body before its object
        self._done = False  # for a body that is one object

    def push(self, piece: bytes) -> bytes:
        return self._pushed_events(piece) if self._streams else self._pushed_object(piece)

    def finish(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._with_field(rest) if self._streams else rest

    def _pushed_object(self, piece: bytes) -> bytes:
        if self._done:
            return piece
        self._rest += piece
        begin = self._rest.find(b"{")
        if begin < 0:
            return b""
        body, self._rest, self._done = self._rest, b"", True
        return body[: begin + 1] + self._field + body[begin + 1 :]

    def _pushed_events(self, piece: bytes) -> bytes:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return b"".join(self._with_field(line) + b"\n" for line in lines)

    def _with_field(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or line.startswith(_ERROR):
            return line
        return _DATA + self._field + line[len(_DATA) :]
