"""What a talker's response reads, how long it may be, and its frames on their way to the job."""

import asyncio
from dataclasses import dataclass

from sglang_live.errors import StageFailedError
from sglang_live.messages import TalkerInput
from sglang_live.models.family import TextReader
from sglang_live.speakable.pieces import Limits, Pieces

# Four frames per token are usual, and a response has at most 4096 tokens: 22 minutes.
MAX_FRAMES = 16_384
# A talker reads one token per frame, several times as fast as it speaks: it needs the next words
# before a sentence is complete. Figures and marks need the words beside them.
_LIMITS = Limits(first_words=2, first_most=6, enough=20, much=60, longest=120)


class SpokenIds:
    """The text of a response as ids of the talker's own vocabulary, for a talker that reads text.

    What is not spoken, such as markdown, code and emoji, does not reach the talker (speakable/).
    """

    def __init__(self, reader: TextReader):
        self._encode = reader.encode
        self._pieces = Pieces(reader.style, _LIMITS)
        self._has_begun = False

    @property
    def n_unspeakable(self) -> int:
        """Letters that the talker cannot speak, and that were left out."""
        return self._pieces.n_unspeakable

    def add(self, part: TalkerInput) -> list[int]:
        """The ids that are certain with this part of the response."""
        pieces = self._pieces.add(part.text)
        if part.done:
            pieces += self._pieces.end()
        return [token for piece in pieces if piece.spoken for token in self._ids(piece.spoken)]

    def _ids(self, words: str) -> list[int]:
        # Tokenizers join a space with the word behind it: pieces then give the ids of the whole.
        text = f" {words}" if self._has_begun else words
        self._has_begun = True
        return self._encode(text)


# Four to six frames per token are usual (0.32 to 0.48 s). Pauses add to that in short responses:
# recordings of single cards take up to 0.52 s per token.
FRAMES_PER_TOKEN = 12
SPARE_FRAMES = 50


@dataclass(slots=True)
class SpeechBound:
    """Of one response: a talker that misses its end would go on for 22 minutes.

    most: frames for which the engine has room.
    n_ids: text tokens so far.
    is_complete: whether the text is complete.
    """

    most: int
    n_ids: int = 1  # the one with which a response begins
    is_complete: bool = False

    @property
    def n_read(self) -> int:
        """Text tokens so far, without the end."""
        return self.n_ids - self.is_complete

    @property
    def max_frames(self) -> int:
        """Until the text is complete, only the room: the talker waits for text by itself."""
        if not self.is_complete:
            return self.most
        return min(self.most, SPARE_FRAMES + FRAMES_PER_TOKEN * self.n_ids)


UNBOUNDED = SpeechBound(1 << 30)

# Frames leave the scheduler before the response's end does, but through another socket.
FRAMES_TIMEOUT_S = 5.0
# Frames per message: a vocoder takes this many at once; its buffer for a response is larger.
MOST_AT_ONCE = 256


class FrameQueue:
    """Frames of one response in order. A slow reader gets more of them at once.

    Args:
        n_known: frames that the reader has already.
        bound: those beyond it, which the engine makes until it is told to end, are left out.
    """

    def __init__(self, n_known: int = 0, bound: SpeechBound = UNBOUNDED) -> None:
        self._bound = bound
        self._ready: list[list[int]] = []
        self._n_known = n_known
        self._next = n_known
        self._expected: int | None = None
        self._changed = asyncio.Event()
        self._all_in = asyncio.Event()
        self.n_sent = n_known

    def put(self, index: int, codes: list[int]) -> None:
        if index < self._n_known:
            return  # the engine reports the newest one that it prefills
        if index >= self._bound.max_frames:
            return
        if index != self._next:
            # A frame is reported once and in order; any error would be audible.
            raise AssertionError(f"frame {index} came, {self._next} was next")
        self._next += 1
        self._ready.append(codes)
        self._notify()

    async def expect(self, n_frames: int) -> None:
        """Set how many frames the engine made, and wait until those within the bound have come.

        Raises:
            StageFailedError: some did not come.
        """
        self._expected = n_frames = min(n_frames, max(self._bound.max_frames, self._next))
        if self._next < n_frames:
            self._all_in.clear()
        self._notify()
        try:
            async with asyncio.timeout(FRAMES_TIMEOUT_S):
                await self._all_in.wait()
        except TimeoutError as error:
            raise StageFailedError(f"{self._next} of {n_frames} codec frames came") from error

    def _notify(self) -> None:
        self._changed.set()
        if self._expected is not None and self._next >= self._expected:
            self._all_in.set()

    async def next(self) -> list[list[int]]:
        """The codes of the frames that wait, at most MOST_AT_ONCE. Empty after the last frame."""
        while not self._ready:
            if self._expected is not None and self.n_sent >= self._expected:
                return []
            self._changed.clear()
            await self._changed.wait()
        frames, self._ready = self._ready[:MOST_AT_ONCE], self._ready[MOST_AT_ONCE:]
        self.n_sent += len(frames)
        return frames
