"""The family Step-Audio 2 mini: one language model that hears speech by an encoder of its own, and
writes a token of text and four codes of speech in turns.

Voices are those of token2wav/spk2info.pt, which CosyVoice 2 writes (add_zero_shot_spk,
save_spkinfo): its models of recordings are those that are published with Step-Audio, too.
Source: arXiv:2507.16632; stepfun-ai/Step-Audio2, Apache-2.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_live.errors import BadInputError
from sglang_live.models.cosyvoice.family import N_CODES, voice_names
from sglang_live.models.family import (
    ModelFacts,
    check_llama,
    check_number,
    kv_values,
    read_json,
)

MODEL_TYPE = "step_audio_2"
DECODER = "token2wav"
FLOW_FILE, HIFT_FILE, VOICES_FILE = "flow.pt", "hift.pt", "spk2info.pt"
BEGIN, END = "<|BOT|>", "<|EOT|>"
SPEECH = "<tts_start>"
AUDIO_BEGIN, AUDIO_PLACE, AUDIO_END = "<audio_start>", "<audio_patch>", "<audio_end>"
_PACKAGE = "sglang_live.models.step_audio"
# Of the encoder's config: those that its layers have to fit.
_ENCODER = (
    *("n_mels", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("llm_dim", "kernel_size", "adapter_stride"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAudioSpec:
    """
    text, encoder: the configs of the language model and of the encoder of speech.
    special: ids of control tokens and codes, by name.
    first_code, n_codes: ids of the codes, in a row.
    """

    path: Path
    text: Mapping[str, Any]
    encoder: Mapping[str, Any]
    special: Mapping[str, int]
    first_code: int
    n_codes: int

    @classmethod
    def load(cls, path: Path) -> "StepAudioSpec":
        """Raises BadInputError: it is another model of this type, or a file lacks something."""
        config = read_json(path / "config.json")
        text, encoder = (_section(path, config, f"{x}_config") for x in ("text", "audio_encoder"))
        if missing := [name for name in _ENCODER if not isinstance(encoder.get(name), int)]:
            raise BadInputError(f"{path}: audio_encoder_config lacks {', '.join(missing)}")
        if encoder["llm_dim"] != text.get("hidden_size"):
            raise BadInputError(
                f"{path}: the encoder is for a language model of width {encoder['llm_dim']}, this "
                f"one has {text.get('hidden_size')}"
            )
        added = read_json(path / "tokenizer_config.json").get("added_tokens_decoder", {})
        special = {token["content"]: int(number) for number, token in added.items()}
        names = BEGIN, END, SPEECH, AUDIO_BEGIN, AUDIO_PLACE, AUDIO_END, code_name(0)
        if missing := [name for name in names if name not in special]:
            raise BadInputError(
                f"{path}: the tokenizer lacks {', '.join(missing)}: this is not Step-Audio 2 mini"
            )
        first, n = special[code_name(0)], 1
        # The one behind them stands for no code, where text is longer than its speech.
        while n < N_CODES and special.get(code_name(n + 1)) == first + n + 1:
            n += 1
        return cls(
            path=path, text=text, encoder=encoder, special=special, first_code=first, n_codes=n
        )


def _section(path: Path, config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    if not isinstance(found, dict):
        raise BadInputError(f"{path}/config.json lacks {name}")
    return found


def code_name(code: int) -> str:
    return f"<audio_{code}>"


class StepAudio:
    thinker = f"{_PACKAGE}.parts:StepAudioThinker"
    decoder = f"{_PACKAGE}.decoder:StepAudioDecoder"
    recogniser = talker = voice = None

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def facts(self, path: Path) -> ModelFacts:
        spec = StepAudioSpec.load(path)
        for name in (FLOW_FILE, HIFT_FILE):
            if not (path / DECODER / name).is_file():
                raise BadInputError(f"{path / DECODER / name} is missing: it belongs to Step-Audio")
        return ModelFacts(
            path=path,
            weights=path,
            family=__name__,
            stages=("thinker", "vocoder"),
            own_voice=True,
            voices=voice_names(path / DECODER),
            vocab_size=spec.text["vocab_size"],
            context_tokens=spec.text["max_position_embeddings"],
            kv_values=kv_values(spec.text),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "thinker":
            check_llama(flag, n_ranks, StepAudioSpec.load(path).text)


FAMILY = StepAudio()
