"""Function calls that end within their tokens: close to the limit, and in a string or list that is
long enough, a call's grammar allows only the shortest text that completes it.

In: the grammar and the token limit of a request. Out: token masks.
Owner: one CallGrammar per request, in the place of SGLang's grammar object.
"""

import logging
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.managers.schedule_batch import Req
from torch import Tensor
from xgrammar import Grammar, TokenizerInfo

from sglang_live.models.grammars.call_grammar import MARK
from sglang_live.models.grammars.grammar_rules import rules_of
from sglang_live.models.grammars.shortest_end import EndFinder, ShortestTexts

log = logging.getLogger(__name__)

# The token that ends a response, and continuations of a character that is in several tokens.
_SPARE_TOKENS = 4
_LONGEST_TOKEN = 32


@lru_cache(maxsize=64)
def texts_of(grammar: str) -> ShortestTexts:
    return ShortestTexts(rules_of(Grammar.from_ebnf(grammar)))


class Vocabulary:
    """ids: token by its bytes; texts: bytes by token; stops: tokens that end a response."""

    def __init__(self, info: TokenizerInfo):
        self.texts: list[bytes] = info.decoded_vocab
        self.stops = frozenset(info.stop_token_ids)
        special = self.stops | set(info.special_token_ids)
        self.ids = {
            text: n
            for n, text in enumerate(self.texts)
            if 0 < len(text) <= _LONGEST_TOKEN and n not in special
        }

    def first_tokens(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Tokens that the text begins with, the longest first, and their lengths."""
        for n in range(min(len(text), _LONGEST_TOKEN), 0, -1):
            if (token := self.ids.get(text[:n])) is not None:
                yield token, n

    def n_tokens(self, text: str) -> int:
        """Tokens of a text if each is the longest that fits."""
        left, n = text.encode(), 0
        while left:
            _, length = next(self.first_tokens(left), (0, 1))
            left, n = left[length:], n + 1
        return n


class CallGrammar(XGrammarGrammar):
    """
    Args:
        n_tokens: of the whole response.
    """

    def __init__(self, grammar: XGrammarGrammar, vocabulary: Vocabulary, n_tokens: int):
        super().__init__(
            grammar.matcher,
            grammar.vocab_size,
            grammar.ctx,
            grammar.override_stop_tokens,
            grammar.key_string,
            grammar.grammar_stats,
        )
        self._vocabulary = vocabulary
        self._n_tokens = n_tokens
        self._texts = texts_of(grammar.key_string)
        # Texts beyond it have too many tokens, however long these are.
        self._most = n_tokens * _LONGEST_TOKEN
        # What one choice of the model can make necessary is kept free as well.
        detour = islice(self._texts.text_of(self._texts.longest_detour), self._most)
        self._n_detour = vocabulary.n_tokens("".join(detour))
        self._follow()

    def _follow(self) -> None:
        self._finder = EndFinder(self._texts)
        self._ends = False
        self._next_look = 0
        self._begun = b""  # bytes of a character whose other bytes are in the next tokens
        for token in self.accepted_tokens:
            self._take(token)

    def _take(self, token: int) -> None:
        if token not in self._vocabulary.stops:
            text, self._begun = _characters(self._begun + self._vocabulary.texts[token])
            self._finder.take(text)

    def accept_token(self, token: int) -> None:
        if not self.is_terminated():
            super().accept_token(token)
            self._take(token)

    def rollback(self, k: int) -> None:
        super().rollback(k)
        self._follow()

    def fill_vocab_mask(self, vocab_mask: Tensor, idx: int) -> None:
        super().fill_vocab_mask(vocab_mask, idx)
        if self._finder.lost or self._begun or not (self._must_end() or self._finder.has_enough):
            return
        row, text = vocab_mask[idx], self._finder.missing(_LONGEST_TOKEN).encode()
        for token, _ in self._vocabulary.first_tokens(text):
            word, bit = divmod(token, 32)
            if int(row[word]) >> bit & 1:
                row.fill_(0)
                row[word] = 1 << bit if bit < 31 else -(1 << 31)
                return

    def _must_end(self) -> bool:
        n_written = len(self.accepted_tokens)
        if self._ends or n_written < self._next_look:
            return self._ends
        n_left = self._n_tokens - n_written - self._n_detour - _SPARE_TOKENS
        n_missing = self._finder.n_missing  # characters; a token has at least one
        if n_missing >= n_left:
            n_missing = self._vocabulary.n_tokens(self._finder.missing(self._most))
        self._ends = n_missing >= n_left
        # With each token until then, one less is left and a detour more may be missing.
        self._next_look = n_written + (n_left - n_missing) // (1 + self._n_detour)
        if self._ends:
            log.info("call_closed n_tokens=%d of=%d", n_written, self._n_tokens)
        return self._ends


def _characters(data: bytes) -> tuple[str, bytes]:
    """The whole characters of a text, and the bytes behind them.

    As xgrammar counts them, by their first byte: it also takes bytes that are no character.
    """
    text, at = "", 0
    while at < len(data):
        first = data[at]
        n = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
        if at + n > len(data):
            break
        text += data[at : at + n].decode(errors="replace")[0]
        at += n
    return text, data[at:]


def limit(result: None, manager: GrammarManager, req: Req) -> None:
    """After GrammarManager._apply_request_reasoning_config: the grammar of a request is ready."""
    grammar = req.grammar
    if isinstance(grammar, XGrammarGrammar) and (grammar.key_string or "").startswith(MARK):
        vocabulary = manager.grammar_backend.grammar_compiler.vocabulary
        req.grammar = CallGrammar(grammar, vocabulary, req.sampling_params.max_new_tokens)
