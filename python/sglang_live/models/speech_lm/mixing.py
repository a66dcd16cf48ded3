"""Text that comes between the frames of a talker's request: groups of text ids, each before a block
of frames, and behind the last of them the rest of the text.

A group is one row of the prompt's ids per step: the step before its first one draws a mark instead
of a code, and no step draws before its last one. On the wire the last id of a group is written as
-1 - id, so that the model sees where it draws again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# In the place of a code: a step before the first row of a group, and before its other rows.
BEGIN, TEXT = -3, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """n_text: ids of a group. n_codes: frames of a block."""

    n_text: int
    n_codes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedVoice:
    """A voice's recording, whose words and codes begin the prompt, in ids of the prompt.

    Attributes:
        head: before all.
        words: of the recording, and of the text as it comes; these are mixed with the codes.
        task_id: behind the text; then only codes come.
        again_id: in a group, stands for the input of the step before it.
    """

    ratio: Ratio
    head: Sequence[int]
    words: Sequence[int]
    codes: Sequence[int]
    task_id: int
    again_id: int

    @property
    def n_prompt(self) -> int:
        """Words in the prompt, those of the text too."""
        return self.ratio.n_text * max(1, -(-len(self.codes) // self.ratio.n_codes))

    @property
    def block(self) -> int:
        """Codes of the recording behind the last words of the prompt; none if a block is whole."""
        return len(self.codes) % self.ratio.n_codes

    @property
    def n_least(self) -> int:
        """Words before which nothing is spoken: behind a whole block a group is next."""
        is_whole = bool(self.codes) and not self.block
        return self.n_prompt + is_whole * self.ratio.n_text

    def prompt(self, words: Sequence[int]) -> list[int]:
        """words: at least n_prompt, the recording's before those of the text."""
        n_text, n_codes = self.ratio.n_text, self.ratio.n_codes
        ids = list(self.head)
        for n in range(self.n_prompt // n_text):
            ids += words[n * n_text : (n + 1) * n_text]
            ids += self.codes[n * n_codes : (n + 1) * n_codes]
        return ids

    def group(self, words: Sequence[int]) -> list[int]:
        """words: n_text of them."""
        return [*words[:-1], -1 - words[-1]]

    def rest(self, words: Sequence[int]) -> list[int]:
        """The last group. words: fewer than n_text."""
        # The reference gives its newest input to the model twice here (inference_bistream).
        return [self.again_id, *words, -1 - self.task_id]
