"""A model family: what its folder models/NAME/ declares in family.py as FAMILY.

A family has a part in each stage: it thinks (an engine that generates text), speaks (an engine that
generates codes) and decodes (codes to sound). A language model without a talker has a recogniser,
which hears for it, and a voice, which reads its text, instead. Each part is named as
"module:attribute", and loaded in its stage's process. A family.py imports neither torch nor SGLang,
and neither does this module: the server reads facts before any stage runs.
"""

import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

import sglang_live.models
from sglang_live.errors import BadInputError
from sglang_live.models.own_voice import Ears, OwnVoice
from sglang_live.models.prompt import PiecewisePrompt, Tokenizer
from sglang_live.models.voice_files import MAX_S, MIN_S
from sglang_live.sound.clip_form import ClipForm
from sglang_live.speakable.style import SpeechStyle


def check_divided(flag: str, n_ranks: int, sizes: Mapping[str, int], n_kv_heads: int) -> None:
    """
    Args:
        flag: that sets the number of ranks, for the error.
        sizes: that have to be divided, by name.
        n_kv_heads: fewer than ranks are copied.
    Raises:
        BadInputError: names the flag, and a size that cannot be divided.
    """
    for name, size in sizes.items():
        if size % n_ranks:
            raise _undivided(flag, n_ranks, name, size)
    if n_kv_heads % n_ranks and n_ranks % n_kv_heads:
        raise _undivided(flag, n_ranks, "num_key_value_heads", n_kv_heads)


def check_llama(flag: str, n_ranks: int, config: Mapping[str, Any]) -> None:
    """check_divided for the layers of a Llama, by its config."""
    sizes = {name: config[name] for name in ("num_attention_heads", "intermediate_size")}
    check_divided(flag, n_ranks, sizes, config["num_key_value_heads"])


def check_number(flag: str, n_ranks: int) -> None:
    """Raises BadInputError if there would be no rank."""
    if n_ranks < 1:
        raise BadInputError(f"{flag} takes a number from 1, got {n_ranks}")


def _undivided(flag: str, n_ranks: int, name: str, size: int) -> BadInputError:
    return BadInputError(
        f"{flag}: this model's {name} is {size}, which cannot be divided among {n_ranks} ranks"
    )


# For a thinker's engine on a CPU: INT8. Empty or absent: its weights stay as in the checkpoint.
CPU_WEIGHTS_ENV = "SGLANG_LIVE_CPU_WEIGHTS"
INT8, OWN = "int8", "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the server knows of a checkpoint.

    Attributes:
        family: module of its family.
        weights: directory of the thinker's weights.
        stages: that the model needs.
        talker_reads_text: instead of the thinker's tokens and the user's messages.
        own_voice: whether there is no talker because the thinker writes the codes of its speech.
        voices: by which a response may be spoken; the first is the default.
        clones_voices: whether its talker takes on voices of recordings.
        voices_need_words: whether it has to know what is said in them.
        voice_rate_hz: of recordings of which its talker makes voices while it serves (VoiceMaker);
            0: it takes them on at its start alone.
        made_voices: of which files its voices are, and what makes these, if it takes on none.
        recordings: directory of those that it takes on (voice_files.py).
        recording_stages: that read them.
        least_recorded_s, most_recorded_s: of one.
        hears: the one language of its recogniser; "": it detects the language, or there is none.
        recogniser_gives: see SpeechModel.gives.
        hears_one_utterance: whether it loses what is said behind a pause.
        sees: whether it takes pictures. watches: whether it takes videos.
        vocab_size, context_tokens: of the thinker; 0: the family has none.
        kv_values: numbers in the thinker's KV of one token; 0: not known.
        good_tokens: length of a conversation that the thinker is good for, if its training was
            shorter than its context; 0: context_tokens.
        follows_instructions: False: nor does it call functions; rules stand in (stand_ins.py).
        duplex_s: seconds of a frame, for a model that hears while it speaks: a call is all that it
            does. 0: it has turns.
        cpu_weights: "int8" if the thinker's weights are quantised on a CPU, unless a flag says
            otherwise.
    """

    path: Path
    family: str
    weights: Path
    stages: tuple[str, ...] = ("thinker", "talker", "vocoder")
    talker_reads_text: bool = False
    own_voice: bool = False
    voices: tuple[str, ...]
    clones_voices: bool = False
    voices_need_words: bool = False
    voice_rate_hz: int = 0
    made_voices: str = ""
    recordings: Path | None = None
    recording_stages: tuple[str, ...] = ("talker",)
    least_recorded_s: float = MIN_S
    most_recorded_s: float = MAX_S
    hears: str = ""
    recogniser_gives: tuple[str, ...] = ()
    hears_one_utterance: bool = False
    sees: bool = False
    watches: bool = False
    vocab_size: int = 0
    context_tokens: int = 0
    good_tokens: int = 0
    follows_instructions: bool = True
    kv_values: int = 0
    duplex_s: float = 0.0
    cpu_weights: str = ""

    @property
    def has_thinker(self) -> bool:
        """False: it only speaks text that it is given."""
        return "thinker" in self.stages


class Family(Protocol):
    """
    Attributes:
        thinker: creates a ThinkerModel from the checkpoint's path. None: the family speaks for
            any language model, and alone what it is given.
        recogniser: creates a Recogniser (models/speech.py) from it, for a thinker that reads speech
            as text. None: the thinker hears.
        talker: creates a TalkerModel from it, and with `voices` from the directory of the
            recordings whose voices it takes on. None: there is none.
        decoder: the class of the vocoder's decoder of codes; see stages/vocoder/stage.py. With
            `voices` as of the talker, if recording_stages has the vocoder. None: there are no
            codes, and the vocoder reads the thinker's text.
        voice: creates a Voice (models/speech.py) from the checkpoint's path, for a vocoder that
            reads.
    """

    thinker: str | None
    recogniser: str | None
    talker: str | None
    decoder: str | None
    voice: str | None

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this config is of this family; see checkpoint_config."""
        ...

    def facts(self, path: Path) -> ModelFacts:
        """Raises BadInputError if the checkpoint lacks something."""
        ...

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        """Raises BadInputError if the stage's model cannot be divided among n_ranks ranks.

        flag: that sets their number, for the error.
        """
        ...


class ThinkerModel(Protocol):
    """How the thinker stage runs a family's thinker.

    Attributes:
        external_models: package with classes of models that SGLang lacks.
        sampling: the checkpoint's own defaults, by SGLang's names. max_new_tokens: the limit of a
            response that has none of its own.
        clip_form: that recordings are brought into. None: they are heard as they are.
        ears: for one that hears by ids. None: its class hears, or a recogniser for it.
        voice: of one that speaks itself. None: of another.
    """

    external_models: str
    sampling: Mapping[str, float]
    clip_form: ClipForm | None
    ears: Ears | None
    voice: OwnVoice | None

    def engine_args(self, cache_dir: Path) -> Mapping[str, Any]:
        """SGLang's server arguments. cache_dir: for files that are derived from the checkpoint."""
        ...

    def prompt(self, tokenizer: Tokenizer) -> PiecewisePrompt: ...


@dataclass(frozen=True, slots=True, eq=False)
class TextReader:
    """How a talker reads the text of any language model.

    encode: token ids in its own vocabulary; never special tokens.
    style: what of a text it can speak.
    """

    encode: Callable[[str], list[int]]
    style: SpeechStyle


class TalkerModel(Protocol):
    """How the talker stage runs a family's talker.

    In a prompt every id determines the embedding at its position, so that SGLang's radix tree can
    compare prompts. The ids of audio states are hashes of them.

    Attributes:
        external_models: package with classes of models that SGLang lacks.
        step_s: seconds of speech of one decode step.
        chunk_steps: steps of which the decoder makes one chunk of audio.
        voices: see ModelFacts.
        temperature, repetition_penalty: of the model's own sampling, by default.
        text_end_id: behind the last token of a response's text.
        reads: None: it reads the thinker's tokens, and the user's messages.
        first_state_id: ids from here on are those of audio states.
        warm_up_prompt: any prompt of a response.
    """

    external_models: str
    step_s: float
    chunk_steps: int
    voices: tuple[str, ...]
    temperature: float
    repetition_penalty: float
    text_end_id: int
    reads: TextReader | None
    first_state_id: int
    warm_up_prompt: list[int]

    def engine_args(self, cache_dir: Path, n_rows: int, max_frames: int) -> Mapping[str, Any]:
        """SGLang's server arguments.

        Args:
            cache_dir: for files that are derived from the checkpoint.
            n_rows: request rows, for which the model keeps tensors of its own.
            max_frames: of one response.
        """
        ...

    def message(self, token_ids: list[int], states: np.ndarray | None) -> list[int]:
        """Prompt ids of one user message; not for a talker that reads text.

        Args:
            token_ids: in the thinker's vocabulary, with a placeholder for each state.
            states: [n_states, thinker_hidden]; None: it has neither audio nor pictures.
        """
        ...

    def response(self, voice: str, first_id: int) -> list[int]:
        """Prompt ids between the user messages and the first frame of a response.

        Args:
            first_id: the first token of its text.
        Raises:
            BadInputError: there is no such voice.
        """
        ...


@runtime_checkable
class VoiceMaker(Protocol):
    """A talker that takes on voices while it serves: a response brings its voice along."""

    def make_voice(self, samples: np.ndarray) -> np.ndarray:
        """float32, of any shape: what the talker, and the decoder, have to know of the voice.

        samples: [n] float32 in [-1, 1], at the model's voice_rate_hz.
        """
        ...


@runtime_checkable
class SpeakerReader(VoiceMaker, Protocol):
    """A TalkerModel whose voices are [1, talker_hidden], at the speaker's place in a prompt."""

    def response_in(self, speaker: np.ndarray, first_id: int) -> tuple[list[int], int]:
        """TalkerModel.response in a voice that make_voice made, and the speaker's place in it.

        Raises:
            BadInputError: another model made it.
        """
        ...


def kv_values(config: Mapping[str, Any]) -> int:
    """Numbers in the KV of one token of a language model; 0: its attention is not the usual one."""
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    layers, heads, hidden = (config.get(name) for name in names)
    if not (layers and heads and hidden) or config.get("kv_lora_rank"):
        return 0
    head_dim = config.get("head_dim") or hidden // heads
    return int(2 * layers * (config.get("num_key_value_heads") or heads) * head_dim)


def family_at(module: str) -> Family:
    """The family that a module declares. Raises BadInputError if there is none."""
    try:
        family: Family = import_module(module).FAMILY
    except (ModuleNotFoundError, AttributeError) as error:
        raise BadInputError(f"{module} is no module of a model family: {error}") from error
    return family


def part(name: str) -> Any:
    """The attribute that "module:attribute" names; it may be one of a class, "Class.method"."""
    module, _, attribute = name.partition(":")
    return attrgetter(attribute)(import_module(module))


def model_facts(path: Path, *more: str) -> ModelFacts:
    """
    Args:
        more: modules of families outside this package, which are asked first.
    Raises:
        BadInputError: there is no such module, no family claims the checkpoint, or the checkpoint
            lacks something.
    """
    config = checkpoint_config(path)
    family = claiming_family(config, *more)
    if family is not None:
        return family.facts(path)
    architectures = ", ".join(config.get("architectures") or ["none"])
    raise BadInputError(
        f"{path}: no model family claims its architecture ({architectures}); asked: "
        f"{', '.join([*more, *family_modules()])}. A language model that neither hears nor speaks "
        "needs --recogniser and --voice-model (docs/cascade.md)"
    )


def claiming_family(config: Mapping[str, Any], *more: str) -> Family | None:
    """The family of a checkpoint with this config; see checkpoint_config.

    more: modules of families that are asked first.
    """
    families = map(family_at, (*more, *family_modules()))
    return next((family for family in families if family.claims(config)), None)


def family_modules() -> list[str]:
    """Modules of the families in the folders of sglang_live.models, in alphabetical order."""
    folders = sglang_live.models.__path__
    names = sorted(found.name for found in pkgutil.iter_modules(folders) if found.ispkg)
    files = [(name, Path(folder) / name / "family.py") for name in names for folder in folders]
    return [f"sglang_live.models.{name}.family" for name, file in files if file.is_file()]


def checkpoint_config(path: Path) -> dict[str, Any]:
    """What is in config.json, and as `files` the names of all: some checkpoints are published
    without it. Raises BadInputError if it is not a JSON object, or cannot be read."""
    file = path / "config.json"
    try:
        names = sorted(one.name for one in path.iterdir()) if path.is_dir() else [file.name]
    except OSError as error:
        raise BadInputError(f"cannot read {path}: {error.strerror}") from error
    return (read_json(file) if file.name in names else {}) | {"files": names}


def read_json(path: Path) -> dict[str, Any]:
    """Raises BadInputError if the file is not a JSON object."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"cannot read {path}: {error}") from error
    if not isinstance(document, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return document
