"""The parts of a cascade in their stages' processes (models/family.py), and its prompt.

The prompt of any language model with a chat template is written in pieces that can be appended. A
template renders whole conversations: what it writes around the contents of messages is found by
rendering conversations of known contents; the rest is the same for every conversation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from sglang_live.core import AudioPart, HistoryItem, Role, TextPart
from sglang_live.errors import BadInputError
from sglang_live.models.family import Family, TalkerModel, family_at, part, read_json
from sglang_live.models.piece_talker import PieceTalker
from sglang_live.models.prompt import Markup, Piece, PiecewisePrompt, Tokenizer, Words
from sglang_live.models.speech import Recogniser, Voice

# A user who listens cannot wait for thoughts, nor should they be spoken. By this name the templates
# of models that may think or not leave the thoughts out.
_VARIABLES = {"enable_thinking": False}
# Contents of the rendered conversations; no template has them.
_SYSTEM, _FIRST, _ANSWER, _SECOND = "Qs0qsQ", "Qu1quQ", "Qa2qaQ", "Qu3quQ"


@dataclass(frozen=True, slots=True)
class ChatMarkup:
    """What a chat template writes around contents.

    Attributes:
        system: before and after the instructions; ("", "") if the template has no system messages.
        start: the beginning of a conversation without instructions.
        user: before and after a user message.
        assistant: before and after a response in a conversation.
        opening: before a response that is to be generated.
    """

    system: tuple[str, str]
    start: str
    user: tuple[str, str]
    assistant: tuple[str, str]
    opening: str

    @staticmethod
    def of(tokenizer: Any) -> "ChatMarkup":
        """
        Args:
            tokenizer: of transformers.
        Raises:
            BadInputError: there is no chat template, or none that can be appended to.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise BadInputError("the tokenizer has no chat template")

        def render(*contents: str) -> list[str] | None:
            """The text before, between and after the contents. None: refused by the template."""
            roles = {_SYSTEM: "system", _ANSWER: "assistant"}
            messages = [{"role": roles.get(c, "user"), "content": c} for c in contents]
            try:
                text = tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=contents[-1] != _ANSWER,
                    **_VARIABLES,
                )
            except jinja2.TemplateError:
                return None
            around = []
            for content in contents:
                before, found, text = text.partition(content)
                if not found:
                    return None
                around.append(before)
            return [*around, text]

        turns = render(_FIRST, _ANSWER, _SECOND)
        if turns is None:
            raise BadInputError("the chat template does not render a conversation")
        start, to_answer, to_next, opening = turns
        special = special_tokens(tokenizer)
        pair = render(_FIRST, _SECOND)
        if pair is not None:
            # A user message ends where what follows it differs.
            user_end = _until_special(_common_begin(pair[1], to_answer), special)
            user_begin = pair[1].removeprefix(user_end)
        else:
            user_begin = _from_special(_common_end(start, to_next), special)
            user_end = to_next.removesuffix(user_begin)
            user_end = user_end if to_answer.startswith(user_end) else ""
        if not to_next.endswith(user_begin):
            raise BadInputError("the chat template begins user messages in several ways")
        with_system = render(_SYSTEM, _FIRST, _ANSWER)
        system = "", ""
        if with_system is not None and with_system[1].endswith(user_begin):
            system = with_system[0], with_system[1].removesuffix(user_begin)
        return ChatMarkup(
            system=system,
            start=start.removesuffix(user_begin),
            user=(user_begin, user_end),
            assistant=(to_answer.removeprefix(user_end), to_next.removesuffix(user_begin)),
            opening=opening.removeprefix(user_end),
        )


class TemplatePrompt(PiecewisePrompt):
    """
    Args:
        end_ids: tokens that end a response, beside the tokenizer's and the template's own.
        gives_up, stands_for: see PiecewisePrompt.
    Raises:
        BadInputError: the template has a form that pieces cannot reproduce.
    """

    def __init__(
        self, tokenizer: Any, end_ids: Iterable[int], gives_up: str = "", stands_for: str = ""
    ):
        self.gives_up, self.stands_for = gives_up, stands_for
        self._markup = ChatMarkup.of(tokenizer)
        self._special = special_tokens(tokenizer)
        # A checkpoint may name the end of a document alone, which no response has.
        self._end = _starting(self._markup.assistant[1], self._special)
        ends = [self._end] if self._end else []
        ids = tokenizer.convert_tokens_to_ids([*ends, *filter(None, [tokenizer.eos_token])])
        super().__init__(tokenizer, (*end_ids, *ids), self._markup.system)
        self._check(tokenizer)

    def header(self, instructions: str) -> list[Piece]:
        begin, end = self._markup.system
        if instructions and begin + end:
            return self._around(begin, instructions, end)
        pieces = [Markup(self._markup.start)] if self._markup.start else []
        if instructions:  # the template has no place for them
            return [*pieces, *self._around(self._markup.user[0], instructions, "\n\n")]
        return list(pieces) or [Words(tuple(self.markup_ids("\n")))]

    def item(self, item: HistoryItem) -> list[Piece]:
        is_answer = item.role == "assistant"
        begin, end = self._markup.assistant if is_answer else self._markup.user
        begin, end = begin if item.opens else "", end if item.closes else ""
        if item.token_ids is not None:
            return [Markup(self._markup.opening), Words(item.token_ids), Markup(end)]
        assert not any(isinstance(part, AudioPart) for part in item.parts), "speech is text here"
        texts = [part.text for part in item.parts if isinstance(part, TextPart)]
        return self._around(begin, "".join(texts), end)

    def open_response(self) -> list[Piece]:
        return [Markup(self._markup.opening)]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        end = self._markup.assistant[1]
        if model_wrote_end:
            end = end.removeprefix(self._end)
        return [Markup(end)] if end else []

    def _around(self, begin: str, text: str, end: str) -> list[Piece]:
        """Pieces that give the ids of the whole: a token may span text and markup."""
        before = _until_special(begin, self._special)
        after = _from_special(end, self._special)
        words = self._words(begin[len(before) :] + text + end[: len(end) - len(after)])
        pieces: list[Piece] = [Markup(before), words, Markup(after)]
        return [piece for piece in pieces if piece != Markup("") and piece != Words(())]

    def _check(self, tokenizer: Any) -> None:
        """Compare with the template on a conversation."""
        said: list[tuple[Role, str]] = [
            ("user", "Hi there."),
            ("assistant", "Hello! What is it?"),
            ("user", "Why 42?"),
        ]
        system = [("system", "Be brief.")] if any(self._markup.system) else []
        messages = [{"role": role, "content": text} for role, text in (*system, *said)]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **_VARIABLES
        )
        pieces = self.header(system[0][1] if system else "")
        for role, text in said:
            item = HistoryItem(key="", role=role, parts=(TextPart(text),))
            pieces += self.item(item)
        pieces += self.open_response()
        ids = [i for append in self.appends(pieces) for i in append.token_ids]
        if ids != self.markup_ids(expected):
            raise BadInputError("messages cannot be appended one by one with this chat template")


def special_tokens(tokenizer: Any) -> list[str]:
    """Tokens that no text of users becomes; a checkpoint need not give them a role."""
    added = tokenizer.added_tokens_decoder.values()
    named = [token for token in tokenizer.all_special_tokens if token]
    return sorted({*named, *(token.content for token in added if token.special)})


def _until_special(text: str, special: list[str]) -> str:
    """The text up to the end of its last special token."""
    ends = [text.rfind(token) + len(token) for token in special if token in text]
    return text[: max(ends, default=0)]


def _from_special(text: str, special: list[str]) -> str:
    """The text from the beginning of its first special token on."""
    return text[min((text.find(token) for token in special if token in text), default=len(text)) :]


def _starting(text: str, special: list[str]) -> str:
    """The longest special token with which the text begins; "" if there is none."""
    return max((token for token in special if text.startswith(token)), key=len, default="")


def _common_end(one: str, other: str) -> str:
    return _common_begin(one[::-1], other[::-1])[::-1]


def _common_begin(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))]


_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


class CascadeThinker:
    """A ThinkerModel: any language model that SGLang serves and that has a chat template."""

    external_models, clip_form, ears, voice = "", None, None, None

    def __init__(self, path: Path):
        self._llm = llm = Path(read_json(path / "config.json")["llm"])
        generation = _optional(llm / "generation_config.json")
        config = read_json(llm / "config.json")
        self._end_ids = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
        self._gives_up = config.get("gives_up", ""), config.get("stands_for", "")
        does_sample = generation.get("do_sample", bool(generation.get("temperature")))
        found = {n: generation[n] for n in _SAMPLING if generation.get(n) is not None}
        self.sampling: Mapping[str, float] = MappingProxyType(
            found if does_sample else {"temperature": 0.0}
        )

    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        return {"model_path": str(self._llm), "enable_multimodal": False}

    def prompt(self, tokenizer: Tokenizer) -> TemplatePrompt:
        return TemplatePrompt(tokenizer, self._end_ids, *self._gives_up)


def load_recogniser(path: Path) -> Recogniser:
    recogniser: Recogniser = _loaded(path, "recogniser")
    return recogniser


def load_voice(path: Path) -> Voice:
    voice: Voice = _loaded(path, "voice")
    return voice


def load_talker(path: Path, **voices: Path) -> TalkerModel | PieceTalker:
    family, checkpoint = _talker(path)
    assert family.talker is not None, "composition looked for one"
    talker: TalkerModel | PieceTalker = part(family.talker)(checkpoint, **voices)
    return talker


class TalkerDecoder:
    """The decoder of the talker's family."""

    @staticmethod
    def from_pretrained(path: str | Path, device: Any, dtype: Any, **voices: Path) -> Any:
        family, checkpoint = _talker(Path(path))
        assert family.decoder is not None, "a talker's codes are decoded"
        return part(family.decoder).from_pretrained(
            checkpoint, device=device, dtype=dtype, **voices
        )


def _talker(path: Path) -> tuple[Family, Path]:
    settings = read_json(path / "config.json")["talker"]
    return family_at(settings["family"]), Path(settings["path"])


def _loaded(path: Path, name: str) -> Any:
    entry = read_json(path / "config.json")[name]
    packages = {key: Path(value) for key, value in entry.get("packages", {}).items()}
    return part(entry["part"])(Path(entry["path"]), **packages, **entry.get("settings", {}))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
