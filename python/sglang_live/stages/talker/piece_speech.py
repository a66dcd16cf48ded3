"""The speech of one response that is spoken piece by piece: what is next, and when words end.

In: text and the listener's progress from the orchestrator, frames of pieces. Out: pieces in order;
marks, which are pairs of tokens of the response and the time at which they have sounded; progress
of the request that is running.
Owner: one PieceSpeech per job of the talker stage.
"""

import asyncio
import re
from dataclasses import dataclass

from sglang_live.clock import Clock
from sglang_live.messages import Progress, TalkerInput
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.speakable.pieces import Piece, Pieces
from sglang_live.stages.token_places import TokenPlaces

# Slow speech has 8 characters a second. A piece that takes three times as long has missed its end.
SLOW_CHARACTER_S = 0.125
BOUND_CHARACTER_S, BOUND_SPARE_S = 0.375, 4.0
# Until a piece has ended, its words are expected to take this much longer than those before it.
_CAUTION = 1.25

Marks = list[tuple[int, float]]


@dataclass(slots=True)
class SpokenPiece:
    """
    words: ends of its words in the spoken text, and the tokens of the response up to there.
    most_frames: after which it has missed its end.
    n_frames: that have come.
    n_marked: words with a mark.
    """

    spoken: str
    words: list[tuple[int, int]]
    most_frames: int
    n_frames: int = 0
    n_marked: int = 0


class PieceSpeech:
    """
    Attributes:
        rid: of the request that is running; "": none, or its scheduler may not know it yet.
        n_frames: of all pieces.
        n_read: tokens of their prompts.
    """

    def __init__(self, model: PieceTalker, clock: Clock):
        self._model, self._clock = model, clock
        self._cutter, self._text = Pieces(model.style), TokenPlaces()
        # Without a bound: the text of one response.
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._character_s = SLOW_CHARACTER_S
        self._before_s = 0.0  # speech of the pieces that have ended
        self._progress: tuple[Progress, float] | None = None  # with the time at which it came
        self.rid, self.n_frames, self.n_read = "", 0, 0

    @property
    def n_unspeakable(self) -> int:
        return self._cutter.n_unspeakable

    # --- text ---

    def add(self, part: TalkerInput) -> None:
        self._text.add(part.text, part.n_tokens)
        pieces = self._cutter.add(part.text)
        if part.done:
            pieces += self._cutter.end()
        for piece in pieces:
            self._pieces.put_nowait(piece)
        if part.done:
            self._pieces.put_nowait(None)

    async def next(self) -> SpokenPiece | None:
        """The next piece of which something is said, as soon as it is complete; None: the end."""
        while (piece := await self._pieces.get()) is not None:
            if piece.spoken:
                return self._prepared(piece)
        return None

    def _prepared(self, piece: Piece) -> SpokenPiece:
        ends = [match.end() for match in re.finditer(r"\S+", piece.spoken)]
        most_s = BOUND_SPARE_S + BOUND_CHARACTER_S * len(piece.spoken)
        return SpokenPiece(
            piece.spoken,
            [(end, self._text.up_to(piece, end)) for end in ends],
            most_frames=round(most_s / self._model.frame_s),
        )

    # --- frames ---

    def spoken(self, piece: SpokenPiece, n_frames: int) -> Marks:
        """Count frames that have come. Returns marks of the words that they hold, presumably.

        The share of a word in its piece is known at the end of the piece only. Until then a slow
        pace is assumed: a user who interrupts has rather heard more.
        """
        self.n_frames += n_frames
        piece.n_frames += n_frames
        marks: Marks = []
        for end, n_tokens in piece.words[piece.n_marked :]:
            if (end_s := end * self._character_s) > piece.n_frames * self._model.frame_s:
                break
            marks.append((n_tokens, self._before_s + end_s))
        piece.n_marked += len(marks)
        return marks

    def end(self, piece: SpokenPiece) -> Marks:
        """All words of a piece that has ended, by their shares of its sound."""
        piece_s = piece.n_frames * self._model.frame_s
        character_s = piece_s / len(piece.spoken)
        marks = [(n_tokens, self._before_s + end * character_s) for end, n_tokens in piece.words]
        self._before_s += piece_s
        self._character_s = min(SLOW_CHARACTER_S, _CAUTION * character_s)
        return marks

    # --- progress ---

    def take_progress(self, progress: Progress) -> None:
        self._progress = progress, self._clock.now_s()

    def progress(self) -> Progress | None:
        """The listener's progress in the running request: behind its begin while pieces before it
        are heard. None: it is not known."""
        if self._progress is None:
            return None
        progress, at_s = self._progress
        since_s = self._clock.now_s() - at_s if progress.advancing else 0.0
        consumed_s = progress.consumed_s + since_s - self._before_s
        return Progress(progress.job_id, consumed_s, progress.advancing, progress.interrupts)
