"""A response that is spoken piece by piece: its pieces, their words' ends, what was heard of them.

In: the response's text as it grows, and frames. Out: pieces, and marks of words. A voice that takes
text between its frames gets passages of several sentences behind the first piece, as they grow.
"""

import asyncio
import re
from dataclasses import dataclass, field

import msgspec

from sglang_live.clock import Clock
from sglang_live.messages import Heard, TalkerInput
from sglang_live.models.piece_talker import MOST_SILENT, FrameTalker, PieceTalker
from sglang_live.models.speech_lm.mixing import MixedVoice
from sglang_live.speakable.pieces import Limits, Piece, Pieces
from sglang_live.stages.talker.mixed_text import MixedText
from sglang_live.stages.token_places import TokenPlaces

# Slow speech has 8 characters a second. A piece that takes three times as long has missed its end.
SLOW_CHARACTER_S = 0.125
BOUND_CHARACTER_S, BOUND_SPARE_S = 0.375, 4.0
# Of a passage, at the end of a sentence and of any part. Source: split_paragraph of CosyVoice
# (utils/frontend_utils.py).
LEAST_WORDS, MOST_WORDS = 60, 80
# The first piece is as without mixing: no voice can begin with less. Then text is mixed in parts,
# long enough for figures and marks to have the words beside them.
_PARTS = Limits(enough=20, much=60, longest=80)
_SENTENCE_ENDS = tuple(".!?…。！？")
# Until a piece has ended, its words are expected to take this much longer than those before it.
_CAUTION = 1.25

Marks = list[tuple[int, float]]


@dataclass(slots=True)
class SpokenPiece:
    """
    words: ends of its words in the spoken text, and the tokens of the response up to there.
    most_frames: after which it has missed its end.
    mixed: its text, which may still grow; None: all of it is there.
    n_frames: that have come.
    n_silent: silent frames in a row, the newest that the engine has made.
    n_marked: words with a mark.
    known: frames that another replica has made of it, until they are made again: all of its steps
        are sampled anew, because the engine's penalty counts those that it has sampled itself.
    """

    spoken: str = ""
    words: list[tuple[int, int]] = field(default_factory=list)
    most_frames: int = 0
    mixed: MixedText | None = None
    n_frames: int = 0
    n_silent: int = 0
    n_marked: int = 0
    known: list[list[int]] = field(default_factory=list)

    @property
    def misses_end(self) -> bool:
        """Of a mixed text, for which the engine has room for any."""
        is_over = self.n_frames >= self.most_frames
        return self.mixed is not None and self.mixed.is_complete and is_over


class PieceSpeech:
    """
    Attributes:
        rid: of the request that is running; "": none, or its scheduler may not know it yet.
        n_frames: of all pieces.
        n_read: tokens of their prompts.
    """

    def __init__(self, model: PieceTalker, clock: Clock, mixed: MixedVoice | None = None):
        """mixed: of the voice, which speaks passages as they grow, behind a first piece; None: it
        speaks pieces."""
        self._model = model
        self._clock = clock
        self._mixed = mixed
        self._cutter = Pieces(model.style, _PARTS if mixed else None)
        self._text = TokenPlaces()
        # Without a bound: the text of one response.
        self._pieces: asyncio.Queue[SpokenPiece | None] = asyncio.Queue()
        self._passage: SpokenPiece | None = None  # that grows
        self._n_pieces = 0
        self._character_s = SLOW_CHARACTER_S
        self._before_s = 0.0  # speech of the pieces that have ended
        self._dropped_s = 0.0  # of the running one's steps those that are not decoded
        self._heard: tuple[Heard, float] | None = None  # with the time at which it came
        self.rid = ""
        self.n_frames = 0
        self.n_read = 0

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
            if piece.spoken:
                self._take(piece)
        if part.done:
            self._end_passage()
            self._pieces.put_nowait(None)

    async def next(self) -> SpokenPiece | None:
        """The next piece of which something is said, as soon as it is complete, or the next passage
        as soon as it begins; None: the end."""
        return await self._pieces.get()

    def _take(self, piece: Piece) -> None:
        grown = self._passage
        if grown is None:
            grown = SpokenPiece()
            if self._mixed and self._n_pieces:
                grown.mixed, self._passage = MixedText(self._mixed), grown
            self._pieces.put_nowait(grown)
            self._n_pieces += 1
        gap = " " if grown.spoken else ""
        begin = len(grown.spoken + gap)
        ends = [match.end() for match in re.finditer(r"\S+", piece.spoken)]
        grown.words += [(begin + end, self._text.up_to(piece, end)) for end in ends]
        grown.spoken += gap + piece.spoken
        most_s = BOUND_SPARE_S + BOUND_CHARACTER_S * len(grown.spoken)
        grown.most_frames = round(most_s / self._model.frame_s)
        if grown.mixed:
            assert isinstance(self._model, FrameTalker)
            grown.mixed.add(self._model.words(gap + piece.spoken))
            least = LEAST_WORDS if piece.spoken.endswith(_SENTENCE_ENDS) else MOST_WORDS
            if grown.mixed.n_words >= least:
                self._end_passage()

    def _end_passage(self) -> None:
        if self._passage is not None and self._passage.mixed:
            self._passage.mixed.end()
        self._passage = None

    # --- frames ---

    def audible(self, piece: SpokenPiece, frames: list[list[int]]) -> list[list[int]]:
        """Of the engine's next frames those that are decoded: without silence that lasts, and steps
        that took text."""
        kept = []
        for frame in frames:
            if frame[0] < 0:
                continue
            is_silent = frame[0] in self._model.silent_codes
            piece.n_silent = piece.n_silent + 1 if is_silent else 0
            if piece.n_silent <= MOST_SILENT:
                kept.append(frame)
        self._dropped_s += (len(frames) - len(kept)) * self._model.frame_s
        return kept

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
        self._dropped_s = 0.0
        self._character_s = min(SLOW_CHARACTER_S, _CAUTION * character_s)
        return marks

    # --- what was heard ---

    def note_heard(self, news: Heard) -> None:
        self._heard = news, self._clock.now_s()

    def heard_of_request(self) -> Heard | None:
        """What was heard of the running request: behind its begin while pieces before it are heard.
        None: it is not known. The engine counts all frames that it makes, dropped ones too."""
        if self._heard is None:
            return None
        news, at_s = self._heard
        since_s = news.speed * (self._clock.now_s() - at_s) if news.advancing else 0.0
        heard_s = news.heard_s + since_s - self._before_s + self._dropped_s
        return msgspec.structs.replace(news, heard_s=heard_s)
