"""The family CosyVoice 2 and 3: a talker that speaks the text of any language model.

Its checkpoint has no config.json, but a cosyvoice2.yaml or cosyvoice3.yaml. Voices are those of
`spk2info.pt`, which CosyVoice itself writes (add_zero_shot_spk, save_spkinfo), and of recordings
with their words.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.family import ModelFacts, check_llama, check_number, read_json
from sglang_live.models.speech_lm.mixing import Ratio

WEIGHTS, VOICES = "llm.pt", "spk2info.pt"
# Of the encoder of speakers, beside that of codes.
SPEAKER_FILE = "campplus.onnx"
MADE_VOICES = f"{VOICES}, which CosyVoice writes (add_zero_shot_spk, save_spkinfo)"
# The language model from which it was trained: its config and its tokenizer.
BASE = "CosyVoice-BlankEN"
_DECODER_FILES = "flow.pt", "hift.pt"
# Source: _extract_speech_token (cli/frontend.py), which refuses longer ones.
MOST_RECORDED_S = 30.0
FRAME_S = 0.04
N_CODES = 6561
# With which text and codes are mixed. Source: mix_ratio of Qwen2LM (cosyvoice/llm/llm.py).
RATIO = Ratio(n_text=5, n_codes=15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """
    Attributes:
        n_ids: codes, and marks behind them, each of which ends a piece.
        end_id: the mark that the model was trained to end with.
        fill_id: the mark behind a block of codes, where text is mixed with them.
        late_id: that is not drawn before the least number of codes: of version 3 another one than
            end_id, as in the reference (sampling_ids).
        prompt_ids: marks whose embeddings are before and behind the text of a prompt; None: those
            have a table of their own.
        is_instructed: whether a prompt needs the mark that ends an instruction.
        codes_file: the encoder of codes.
        most_hz: of the mel of a recording.
        silent_codes: of silence and breath; see PieceTalker.
    """

    n_ids: int
    end_id: int
    fill_id: int
    late_id: int
    prompt_ids: tuple[int, int] | None
    is_instructed: bool
    codes_file: str
    most_hz: float
    silent_codes: frozenset[int] = frozenset()


# By the file that tells. Source: Qwen2LM and CosyVoice3LM (cosyvoice/llm/llm.py, Apache-2.0), and
# CosyVoice3Model (cli/model.py).
VERSIONS: Mapping[str, Version] = MappingProxyType(
    {
        "cosyvoice2.yaml": Version(
            n_ids=N_CODES + 3,
            end_id=N_CODES,
            fill_id=N_CODES + 2,
            late_id=N_CODES,
            prompt_ids=None,
            is_instructed=False,
            codes_file="speech_tokenizer_v2.onnx",
            most_hz=8_000.0,
        ),
        "cosyvoice3.yaml": Version(
            n_ids=N_CODES + 200,
            end_id=N_CODES + 1,
            fill_id=N_CODES + 3,
            late_id=N_CODES,
            prompt_ids=(N_CODES, N_CODES + 2),
            is_instructed=True,
            codes_file="speech_tokenizer_v3.onnx",
            most_hz=12_000.0,
            silent_codes=frozenset((1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323)),
        ),
    }
)


def version_of(path: Path) -> Version:
    """Raises BadInputError if the directory is neither."""
    for name, version in VERSIONS.items():
        if (path / name).is_file():
            return version
    raise BadInputError(f"{path} has none of {', '.join(VERSIONS)}")


class _Names(pickle.Unpickler):
    """Reads what is no tensor, so that nothing of torch is needed, and no code is run."""

    def find_class(self, module: str, name: str) -> Any:
        return lambda *args, **kwargs: None

    def persistent_load(self, pid: Any) -> None:
        return None


def voice_names(path: Path) -> tuple[str, ...]:
    """Raises BadInputError if its file of voices is missing, broken, or has none."""
    file = path / VOICES
    try:
        with zipfile.ZipFile(file) as archive:
            inner = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(inner) as opened:
                found = _Names(opened).load()
        names = tuple(name for name in found if isinstance(name, str) and name)
    except FileNotFoundError as error:
        raise BadInputError(
            f"{file} is missing, so there is no voice: needed is {MADE_VOICES}"
        ) from error
    except (
        OSError,
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        StopIteration,
        TypeError,
        ValueError,
        EOFError,
        AttributeError,
    ) as error:
        raise BadInputError(f"{file} cannot be read: {error}") from error
    if not names:
        raise BadInputError(f"{file} has no voice")
    return names


class CosyVoice:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.cosyvoice.parts:CosyVoiceTalker"
    decoder = "sglang_live.models.cosyvoice.decoder:CosyVoiceDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return not VERSIONS.keys().isdisjoint(config.get("files", ()))

    def facts(self, path: Path) -> ModelFacts:
        for name in (WEIGHTS, f"{BASE}/config.json", *_DECODER_FILES):
            if not (path / name).is_file():
                raise BadInputError(f"{path / name} is missing: it belongs to CosyVoice")
        if not zipfile.is_zipfile(path / WEIGHTS):
            raise BadInputError(f"{path / WEIGHTS} is no file of weights, or cut short")
        encoders = (version_of(path).codes_file, SPEAKER_FILE)
        clones_voices = all((path / name).is_file() for name in encoders)
        has_voices = (path / VOICES).is_file() or not clones_voices
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            voices=voice_names(path) if has_voices else (),
            clones_voices=clones_voices,
            voices_need_words=True,
            recording_stages=("talker", "vocoder"),
            most_recorded_s=MOST_RECORDED_S,
            voice_rate_hz=RECORDING_RATE_HZ if clones_voices else 0,
            made_voices=f"{MADE_VOICES}; recordings need {' and '.join(encoders)}",
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker":
            check_llama(flag, n_ranks, read_json(path / BASE / "config.json"))


FAMILY = CosyVoice()
