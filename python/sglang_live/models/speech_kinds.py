"""Recognisers and voices: built-in ones by name, those of users by the files in a directory.

Without torch, onnxruntime and CTranslate2: the server looks before it starts a stage. Another kind
is one more row.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.models.kokoro import KOKORO, PACKAGED_KOKORO
from sglang_live.models.packages import HIBARI, MOONSHINE
from sglang_live.models.piper import PIPER
from sglang_live.models.speech import FilesKind, SpeechModel
from sglang_live.models.whisper import WHISPER

RECOGNISERS: Mapping[str, SpeechModel] = {
    "moonshine": SpeechModel(
        package=MOONSHINE,
        load="sglang_live.models.moonshine:MoonshineRecogniser.load",
        offers=("en",),
    ),
}
VOICES: Mapping[str, SpeechModel] = {
    "hibari": SpeechModel(
        package=HIBARI,
        load="sglang_live.models.hibari:HibariVoice.load",
        offers=("heart",),
    ),
    "kokoro": PACKAGED_KOKORO,
}
RECOGNISER_KINDS: Sequence[FilesKind] = (WHISPER,)
VOICE_KINDS: Sequence[FilesKind] = (KOKORO, PIPER)


def find_recogniser(given: str, language: str) -> SpeechModel:
    """
    Args:
        given: the name of a built-in one, or a path.
        language: that it is told to hear, or "".
    Raises:
        BadInputError: there is none, a file of it is broken, or it does not know the language.
    """
    found = _found("recogniser", given, RECOGNISERS, RECOGNISER_KINDS)
    if language and language not in found.offers:
        raise BadInputError(
            f"the recogniser {given} does not know the language {language!r}; it knows "
            f"{', '.join(found.offers)}"
        )
    return found


def find_voice(given: str) -> SpeechModel:
    """
    Args:
        given: the name of a built-in one, or a path.
    Raises:
        BadInputError: there is none, or a file of it is broken.
    """
    return _found("voice", given, VOICES, VOICE_KINDS)


def _found(
    what: str, given: str, named: Mapping[str, SpeechModel], kinds: Sequence[FilesKind]
) -> SpeechModel:
    if given in named:
        return named[given]
    path, names = Path(os.path.expanduser(given)), ", ".join(named)
    if not path.exists():
        raise BadInputError(f"there is no {what} {given!r}: neither a path nor one of {names}")
    for kind in kinds:
        if kind.claims(path):
            return kind.read(path.resolve())
    looked_for = "; ".join(kind.holds for kind in kinds)
    raise BadInputError(f"{given} is no {what}: looked for {looked_for}")
