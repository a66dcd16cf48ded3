"""The served model: its name and its voices."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from sglang_live.errors import ModelNotFoundError
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.settings import Settings

# Clients of OpenAI's servers send one of these unless they are told another.
_OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "beacon", "bossa", "cedar", "cinder", "coral", "delta", "echo"),
    *("fable", "gleam", "marin", "meridian", "nova", "onyx", "quartz", "ripple", "sage"),
    *("shida", "shimmer", "stone", "tempo", "verse", "vesper", "willow"),
)
_MOST_LISTED = 20
# What SGLang's clients call the one model of a server.
_UNNAMED = "default"
# Clients of OpenAI's servers send such a name in their settings, also if they are told a model.
_OF_OPENAI = re.compile(r"(gpt|whisper)-[\w.:-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(Settings):
    """
    has_language_model: False: the server only speaks text, and refuses conversations.
    default_instructions: system prompt of a session without instructions.
    about: what the page says of the model. suggestions: questions that it offers.
    recognises: the model has a recogniser of its own. hears: the one language of it; "": it detects
        the language of each utterance.
    recogniser_gives: what it has beside text (models/speech.py: SpeechModel.gives).
    hears_one_utterance: recordings are transcribed utterance by utterance.
    sees: it takes pictures. watches: it takes videos.
    knows_voices: there is a speaker model, so that sessions ignore other voices by default.
    follows_instructions: False: it says what it is told to speak about word for word.
    aliases: patterns of other names of the model.
    """

    has_language_model: bool = True
    default_instructions: str = ""
    about: str = ""
    suggestions: tuple[str, ...] = ()
    recognises: bool = False
    hears: str = ""
    recogniser_gives: tuple[str, ...] = ()
    hears_one_utterance: bool = False
    sees: bool = False
    watches: bool = False
    knows_voices: bool = False
    follows_instructions: bool = True
    aliases: tuple[str, ...] = ()


def check_model(
    served: str,
    name: str | None,
    at: str = "model",
    *,
    stock: bool = False,
    aliases: tuple[str, ...] = (),
) -> None:
    """
    Args:
        aliases: see ServedModel.
        name: None for the served model.
        at: path of the name.
        stock: OpenAI's names are names of the served model.
    Raises:
        ModelNotFoundError: another model is named.
    """
    if name in (None, served, _UNNAMED) or (stock and is_of_openai(name)):
        return
    if any(fnmatchcase(str(name), pattern) for pattern in aliases):
        return
    error = ModelNotFoundError(
        f"The model {cut(str(name))!r} does not exist. Available models: {served}."
    )
    error.param = at
    raise error


def is_of_openai(name: str | None) -> bool:
    return name is not None and _OF_OPENAI.fullmatch(name) is not None


def known_voice(voices: tuple[str, ...], name: str | None, at: str = "voice") -> str:
    """The voice that speaks: the default one for None, and for voices of OpenAI's servers.

    Args:
        voices: of the model, in any case of letters.
        at: path of the name.
    Raises:
        ClientEventError: there is no such voice.
    """
    if not voices or name is None:
        return voices[0] if voices else name or ""
    same = [voice for voice in voices if voice.lower() == name.lower()]
    if not same and name not in _OPENAI_VOICES:
        listed = ", ".join(voices[:_MOST_LISTED]) + (", …" if voices[_MOST_LISTED:] else "")
        raise ClientEventError(
            f"There is no voice {cut(name)!r}. The voices are: {listed}.", param=at
        )
    return next((voice for voice in same if voice == name), same[0]) if same else voices[0]


class CustomVoices(Protocol):
    """Voices that clients have made, each for its key alone. Names are ids, which begin with
    CUSTOM_VOICE."""

    def names(self, owner: str) -> tuple[tuple[str, str], ...]:
        """Of the owner's voices the id, and the name that the owner has given it."""
        ...

    def speaker(self, owner: str, voice: str) -> bytes:
        """For TurnRequest.speaker; b"": the owner has no such voice."""
        ...


CUSTOM_VOICE = "voice_"
