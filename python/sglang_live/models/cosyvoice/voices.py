"""What CosyVoice knows of its voices: a recording as codes, and its words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.cosyvoice.family import N_CODES, VOICES
from sglang_live.models.torch_files import read_torch_file


@dataclass(frozen=True, slots=True)
class PromptVoice:
    """
    Attributes:
        text_ids: tokens of what is said in the recording; none for a voice without words.
        codes: of the recording; none without words.
    """

    text_ids: list[int]
    codes: list[int]


def read_voices(path: Path, n_text_ids: int) -> dict[str, PromptVoice]:
    """By name; none without a file, where all are those of recordings.

    n_text_ids: of the tokenizer.
    Raises:
        BadInputError: names the voice that the file has in another form.
    """
    file = path / VOICES
    if not file.is_file():
        return {}
    found = read_torch_file(file)
    voices = {}
    for name, entry in found.items():
        try:
            voice = PromptVoice(
                _ids(entry, "prompt_text", n_text_ids),
                _ids(entry, "llm_prompt_speech_token", N_CODES),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadInputError(f"{file}: voice {name!r} is no zero-shot voice: {error}") from error
        voices[name] = voice
    return voices


def _ids(entry: Any, name: str, n_ids: int) -> list[int]:
    ids: list[int] = entry[name].flatten().tolist()
    if ids and not 0 <= min(ids) <= max(ids) < n_ids:
        raise ValueError(f"{name} has ids from {min(ids)} to {max(ids)}, there are {n_ids}")
    return ids
