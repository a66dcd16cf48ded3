"""A growing text is cut into pieces to be spoken.

In: the text, in parts of any size. Out: pieces, each with its words and its place in the text.

Each character is one step, and what a step decides depends on the characters up to it alone. So
the pieces, and the character with which each of them is complete, are the same however the text is
divided; add() returns all pieces that are complete. No piece has more characters of the text than
Limits.longest, so no text, whatever it is, waits for more than that.
"""

import re
import unicodedata
from dataclasses import dataclass

from sglang_live.speakable.ends import (
    LOOK_BEHIND,
    Strength,
    belongs_together,
    best_pause,
    is_marker,
    is_soft,
    middle,
    strength,
    strength_without_gap,
)
from sglang_live.speakable.markdown import Block, Lines
from sglang_live.speakable.style import SpeechStyle, is_speakable
from sglang_live.speakable.words import wording_of

_WORD = re.compile(r"\A\S+")
# A word that is said as it is written.
_PLAIN = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?,?")


@dataclass(frozen=True, slots=True)
class Piece:
    """
    spoken: words and basic punctuation; empty if the text has nothing to be said.
    source_begin, source_end: characters of the text that it is of, the end exclusive. A piece
        begins where the one before it ends; the first at 0, the last ends with the text.
    """

    spoken: str
    source_begin: int
    source_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    first_words: fewest words of the first piece, if a clause or sentence ends there.
    first_most: words after which the first piece ends in any case.
    enough: characters from which on a piece ends with its sentence.
    much: characters from which on it ends with a clause.
    longest: most characters of a piece.
    """

    first_words: int = 3
    first_most: int = 12
    enough: int = 60
    much: int = 200
    longest: int = 300

    def __post_init__(self) -> None:
        if not 1 <= self.first_words <= self.first_most:
            raise ValueError("first_words is at least 1, and first_most not less")
        if not 1 <= self.enough <= self.much <= self.longest:
            raise ValueError("enough, much and longest are positive, none less than the one before")

    @property
    def pause_words(self) -> int:
        """Fewest words of a first piece that no clause or sentence ends."""
        return (self.first_words + self.first_most) // 2


class Pieces:
    """
    Attributes:
        n_unspeakable: letters of the pieces that the voice cannot speak, and that are left out.
    """

    def __init__(self, style: SpeechStyle | None = None, limits: Limits | None = None):
        self._style = style or SpeechStyle()
        self._limits = limits or Limits()
        self.n_unspeakable = 0
        self._lines = Lines()
        self._out: list[Piece] = []
        self._ended = False
        # The current piece: its text so far, its place, and where it may be cut.
        self._text = ""
        self._begin = 0
        self._clauses: list[tuple[int, bool]] = []  # with True where a sentence ends
        self._words = 0  # place of the last word's begin; the piece's own begin if none
        self._n_words = 0
        self._is_first = True
        self._starts_line = True
        self._torn = False  # the piece begins inside of a word
        # The current line and the gap before the next word.
        self._line_begin = 0
        self._broken_line = ""
        self._in_code = False
        self._in_word = False
        self._word_counts = False
        self._breaks = 0
        self._gap = 0  # characters of whitespace since the last word
        self._said_block = Block.TEXT  # of which the voice's remark was said

    def add(self, text: str) -> list[Piece]:
        """Append to the text; the pieces that are complete with it.

        Raises:
            ValueError: after end().
        """
        if self._ended:
            raise ValueError("the text has ended: use new Pieces for another one")
        for char in text:
            self._step(char)
        return self._taken()

    def end(self) -> list[Piece]:
        """The rest, now that nothing follows.

        Raises:
            ValueError: when called again.
        """
        if self._ended:
            raise ValueError("the text has ended: use new Pieces for another one")
        self._ended = True
        if self._text:
            self._cut(self._end, closes=True, block=self._lines.block)
        return self._taken()

    def beginning(self, n_words: int) -> Piece | None:
        """The first words of a first piece that is not complete.

        Args:
            n_words: at most pause_words of the limits.
        Returns:
            The words that the piece will begin with; None before they have come, and where what
            follows may change how they are said, as with figures.
        """
        if not 1 <= n_words <= self._limits.pause_words:
            raise ValueError(f"a piece may have fewer words than {n_words}")
        if not self._is_first or self._n_words < n_words or self._in_code:
            return None
        words = self._text.split(" ")[:n_words]
        if not all(map(_is_plain, words, ["", *words])):
            return None
        text = " ".join(words)
        speech = wording_of(text, self._style, starts_line=self._starts_line, closes=False)
        if len(speech.words.split()) != n_words:
            return None  # in letters that the voice lacks
        return Piece(speech.words, self._begin, self._begin + len(text))

    @property
    def _end(self) -> int:
        return self._begin + len(self._text)

    def _taken(self) -> list[Piece]:
        taken, self._out = self._out, []
        return taken

    def _step(self, char: str) -> None:
        before = self._lines.block
        block_ends = self._lines.step(char)
        if before is Block.TEXT:
            self._step_text(char)
            if self._lines.block is not Block.TEXT:
                self._open_block()
        else:
            self._text += char
            if block_ends:
                self._cut(self._end, closes=False, block=before)
                self._start_line(self._end)
        if (block := self._lines.block) is Block.TEXT:
            while len(self._text) >= self._limits.much and self._cut_long():
                pass
        elif len(self._text) >= self._limits.longest:
            self._cut(self._end, closes=False, block=block)

    def _step_text(self, char: str) -> None:
        if char.isspace():
            if self._in_word:
                self._n_words += self._word_counts
                self._in_word = self._word_counts = False
            self._gap += 1
            if char == "\n":
                self._breaks += 1
                if self._breaks == 1:
                    self._broken_line = self._line()
                self._line_begin = self._end + 1
                self._in_code = False
        else:
            if self._text:
                self._offer(self._boundary(char), char)
            self._gap = self._breaks = 0
            self._in_word = True
            self._word_counts = self._word_counts or char.isalnum()
            if char == "`":
                self._in_code = not self._in_code
        self._text += char

    def _line(self) -> str:
        """The current line, if it began in this piece, without the end of a long one."""
        place = self._line_begin - self._begin
        return self._text[place : place + LOOK_BEHIND] if place >= 0 else "."

    def _boundary(self, char: str) -> Strength:
        """The strength of the boundary between the text and the next character, no whitespace."""
        if not self._gap:
            near = self._text[-LOOK_BEHIND:]
            return Strength.NONE if self._in_code else strength_without_gap(near, char)
        near = self._text[-self._gap - LOOK_BEHIND : -self._gap]
        if self._breaks > 1 or (self._breaks and not is_soft(near, self._broken_line, char)):
            return Strength.SENTENCE
        if not near or (not self._breaks and is_marker(self._line())):
            return Strength.NONE
        found = strength(near, char)
        return min(found, Strength.WORD) if self._in_code else found

    def _offer(self, boundary: Strength, char: str) -> None:
        """Cut before the next character, no whitespace, or note that this is possible."""
        if boundary is Strength.NONE:
            return
        limits = self._limits
        self._words = self._end
        if self._is_first and not self._in_code:
            ends = boundary >= Strength.CLAUSE and self._n_words >= limits.first_words
            if ends:
                self._cut(self._end, closes=boundary is Strength.SENTENCE)
            elif self._n_words >= limits.first_most:
                n = best_pause(self._text, limits.pause_words)
                if n or not belongs_together(self._text, char):
                    self._cut(self._begin + n if n else self._end, closes=False)
        elif boundary is Strength.SENTENCE and len(self._text) >= limits.enough:
            self._cut(self._end, closes=True)
        elif boundary >= Strength.CLAUSE:
            self._clauses.append((self._end, boundary is Strength.SENTENCE))

    def _cut_long(self) -> bool:
        """Cut a piece that has become long, at its best place; False if it may grow further."""
        if self._clauses:
            # The last one, also if none of them is far enough from the piece's begin.
            at, closes = self._clauses[-1]
            self._cut(at, closes=closes)
        elif len(self._text) < self._limits.longest:
            return False
        elif self._words > self._begin:
            self._cut(self._words, closes=False)
        else:
            # Scripts without spaces go on where this piece ends.
            torn = self._text[-1].isascii()
            self._cut(self._end, closes=False)
            self._torn = torn
        return True

    def _open_block(self) -> None:
        """The last characters opened a block that is not spoken: what stands before is a piece."""
        at = self._end - self._lines.marks
        if at > self._begin:
            self._cut(at, closes=True)
        self._in_word = False

    def _start_line(self, at: int) -> None:
        self._line_begin = at
        self._in_code = False
        self._in_word = False
        self._gap = self._breaks = 0

    def _cut(self, at: int, *, closes: bool, block: Block = Block.TEXT) -> None:
        """End the piece before the character at a place, with a full stop if it closes."""
        n = at - self._begin
        if block is Block.TEXT:
            self._speak(self._text[:n], self._begin, closes)
        else:
            self._put(self._said(block, self._text[:n]), self._begin, at)
        self._starts_line = _starts_line(self._text[:n], self._starts_line)
        if self._starts_line:
            self._line_begin = max(self._line_begin, at)
        self._text = self._text[n:]
        self._begin = at
        self._clauses = [clause for clause in self._clauses if clause[0] > at]
        self._words = max(self._words, at)
        self._n_words = 0

    def _put(self, spoken: str, begin: int, end: int) -> None:
        self._out.append(Piece(spoken, begin, end))
        self._is_first = self._is_first and not spoken

    def _speak(self, source: str, begin: int, closes: bool) -> None:
        """Put the words of a text, in two pieces where figures make too many words."""
        text = source
        if self._torn:
            # The rest of a word without end, as its begin before, is no speech.
            text = _WORD.sub("", source)
            self._torn = not text
        speech = wording_of(text, self._style, starts_line=self._starts_line, closes=closes)
        if len(speech.words) > self._limits.longest and len(text) > 1:
            if n := len(source) - len(text):
                self._put("", begin, begin + n)
                self._speak(text, begin + n, closes)
                return
            n = middle(text)
            self._speak(text[:n], begin, False)
            self._starts_line = _starts_line(text[:n], self._starts_line)
            self._speak(text[n:], begin + n, closes)
            return
        self.n_unspeakable += speech.n_unspeakable
        if speech.words:
            self._said_block = Block.TEXT
        self._put(speech.words, begin, begin + len(source))

    def _said(self, block: Block, text: str) -> str:
        """The voice's remark in place of a block, once for blocks that follow one another."""
        content = text
        if block is Block.CODE:
            # The fence's own line names a language, unless backticks close it there.
            first, _, rest = text.partition("\n")
            content = first if "`" in first.lstrip("`") else rest
        if block is self._said_block or not is_speakable(content):
            return ""
        self._said_block = block
        return self._style.says_code if block is Block.CODE else self._style.says_table


def _is_plain(word: str, before: str) -> bool:
    """before: the word before it; empty if there is none."""
    if not _PLAIN.fullmatch(word):
        return False
    if len(word) > 1:
        return word[1:].islower()
    # Behind a name it may be a numeral.
    return word.islower() or not before[:1].isupper() or before.endswith(",")


def _starts_line(before: str, so_far: bool) -> bool:
    """Whether what follows a piece is the first text of its line."""
    return before.rstrip(" \t").endswith("\n") or (so_far and not before.strip())


_MARKUP = re.compile(r"<!--.*?(?:-->|\Z)|</?[a-zA-Z][^<>]*>", re.DOTALL)
# Control, format, private and unassigned characters, other symbols such as emoji, and what modifies
# these: variation selectors, marks around them.
_SILENT = frozenset(("Cc", "Cf", "Co", "Cs", "Cn", "So", "Sk", "Me"))


def spoken_text(text: str, style: SpeechStyle | None) -> str:
    """What has a sound of a text that a talker speaks word for word; "" if nothing has.

    A talker makes noise of what it cannot read, for as long as its bound allows.

    Args:
        style: of a talker that reads words alone. None: it reads whatever is written, in any
            script.
    """
    if style is not None:
        pieces = Pieces(style)
        return " ".join(p.spoken for p in (*pieces.add(text), *pieces.end()) if p.spoken)
    kept = "".join(map(_heard, _MARKUP.sub(" ", text)))
    return kept if is_speakable(kept) else ""


def _heard(char: str) -> str:
    if char.isspace():
        return char
    is_selector = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    return "" if is_selector or unicodedata.category(char) in _SILENT else char
