"""Directories with a Whisper model for CTranslate2. Without CTranslate2 itself."""

from importlib.util import find_spec
from pathlib import Path

from sglang_live.errors import BadInputError
from sglang_live.models.family import read_json
from sglang_live.models.speech_model import FilesKind, SpeechModel
from sglang_live.models.whisper.vocabulary import Vocabulary

_WEIGHTS = "model.bin"


def is_whisper(path: Path) -> bool:
    # CTranslate2 writes the same files for translators; only Whisper's config suppresses tokens.
    config = path / "config.json"
    return (path / _WEIGHTS).is_file() and config.is_file() and "suppress_ids" in read_json(config)


def whisper_at(path: Path) -> SpeechModel:
    """Raises BadInputError if its vocabulary is broken, or CTranslate2 is not installed."""
    if find_spec("ctranslate2") is None:
        raise BadInputError(
            f"{path} needs CTranslate2, which is not installed: pip install 'sglang-live[whisper]'"
        )
    return SpeechModel(
        path=path,
        load="sglang_live.models.whisper.recogniser:WhisperRecogniser.load",
        offers=Vocabulary.load(path).languages or ("en",),
    )


WHISPER = FilesKind(
    holds="Whisper for CTranslate2 (model.bin, config.json, vocabulary.json)",
    claims=is_whisper,
    read=whisper_at,
)
