"""Qwen3-Omni's ChatML. Its prompts begin with `<|im_start|>`, and each message ends with the next
one's.
"""

from itertools import groupby

from sglang_live.core import AudioPart, HistoryItem, TextPart
from sglang_live.models.prompt import Clip, Markup, Piece, TalkerReadPrompt, Tokenizer, Words
from sglang_live.models.qwen3_omni.spec import Qwen3OmniSpec

_SYSTEM = "<|im_start|>system\n", "<|im_end|>"


class ChatPrompt(TalkerReadPrompt):
    def __init__(self, spec: Qwen3OmniSpec, tokenizer: Tokenizer):
        super().__init__(tokenizer, spec.end_of_turn_ids, _SYSTEM)
        self._spec, self.script_style = spec, spec.script_style
        self.newline_id = self.markup_ids("\n")[0]

    def header(self, instructions: str) -> list[Piece]:
        if not instructions:
            # An empty prefill is impossible, and every history begins with this token.
            return [Markup("<|im_start|>")]
        return [
            Markup("<|im_start|>"),
            self._words(f"system\n{instructions}"),
            Markup("<|im_end|>\n<|im_start|>"),
        ]

    def item(self, item: HistoryItem) -> list[Piece]:
        """One message. Its leading `<|im_start|>` is the end of the pieces before."""
        return [*self._body(item), *([Markup("<|im_end|>\n<|im_start|>")] if item.closes else [])]

    def open_response(self) -> list[Piece]:
        return [Markup("assistant\n")]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        return [Markup("\n<|im_start|>" if model_wrote_end else "<|im_end|>\n<|im_start|>")]

    def segment_ids(self, item: HistoryItem, n_places: list[int]) -> list[int]:
        places = iter(n_places)
        ids: list[int] = []
        begin = [Markup("<|im_start|>")] if item.opens else []
        end = [Markup("<|im_end|>\n")] if item.closes else []
        for piece in (*begin, *self._body(item), *end):
            match piece:
                case Markup():
                    ids += self.markup_ids(piece.text)
                case Words():
                    ids += piece.token_ids
                case Clip():
                    for token_id in self.markup_ids(piece.markup):
                        n = next(places) if token_id == self._spec.audio_pad_id else 1
                        ids += [token_id] * n
        return ids

    def _body(self, item: HistoryItem) -> list[Piece]:
        """Role and content of a message, or of a piece of one."""
        if not (item.opens and item.closes):
            [audio] = item.parts
            assert isinstance(audio, AudioPart)  # only speech is split into several items
            clip = _clip(audio, begins=item.opens, ends=item.closes)
            return [Markup(f"{item.role}\n"), clip] if item.opens else [clip]
        role = Markup(f"{'user' if item.role == 'tool' else item.role}\n")
        if item.token_ids is not None:
            return [role, Words(item.token_ids)]
        pieces: list[Piece] = [role]
        for _, group in groupby(item.parts, key=type):
            parts = list(group)
            clips = [_clip(part) for part in parts if isinstance(part, AudioPart)]
            text = "".join(part.text for part in parts if isinstance(part, TextPart))
            pieces += clips
            if text:
                # A token may span two texts, or the role's newline and the text after it.
                if pieces == [role]:
                    pieces = [self._words(role.text + text)]
                else:
                    pieces.append(self._words(text))
        return pieces


def _clip(audio: AudioPart, *, begins: bool = True, ends: bool = True) -> Clip:
    """begins, ends: whether the audio span begins, and ends, with this clip."""
    begin, end = "<|audio_start|>" * begins, "<|audio_end|>" * ends
    return Clip(audio, f"{begin}<|audio_pad|>{end}")
