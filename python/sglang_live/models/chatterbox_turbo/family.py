"""The family Chatterbox Turbo: a talker that speaks English text of any language model.

Its checkpoint is that of ResembleAI/chatterbox-turbo or chatterbox-nano, which has no config.json:
the sizes are those of the weights. Voices are files that Chatterbox itself writes, in the same
places as Chatterbox's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_live.errors import BadInputError
from sglang_live.models.chatterbox.family import DTYPES, HEAD_DIM, MEAN_WEIGHTS, voice_facts
from sglang_live.models.family import ModelFacts, check_number

WEIGHTS = ("t3_turbo_v1.safetensors", "t3_nano_v1.safetensors")
TOKENIZER = "tokenizer_config.json"
# Of a recording, of which it hears up to 15 s. Source: prepare_conditionals.
LEAST_RECORDED_S = 5.0
_LAYER = re.compile(r"tfmr\.h\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurboSpec:
    """
    Attributes:
        weights: of T3.
        n_ids: codes, and marks behind them.
        n_places: that have a learned embedding, of all that there is before and in the speech.
    """

    path: Path
    weights: Path
    dtype: str
    width: int
    inner: int
    n_layers: int
    n_ids: int
    n_text_ids: int
    n_places: int

    @staticmethod
    def load(path: str | Path) -> "TurboSpec":
        """Raises BadInputError if the directory has no T3 that can be served."""
        path = Path(path)
        found = [path / name for name in WEIGHTS if (path / name).is_file()]
        if len(found) != 1:
            raise BadInputError(f"{path} needs one of {', '.join(WEIGHTS)}, and has {len(found)}")
        [file] = found
        try:
            with safe_open(file, "np") as tensors:
                names = tensors.keys()

                def shape(name: str) -> list[int]:
                    return [int(n) for n in tensors.get_slice(f"{name}.weight").get_shape()]

                n_ids, width = shape("speech_emb")
                return TurboSpec(
                    path=path,
                    weights=file,
                    dtype=DTYPES[tensors.get_slice("speech_head.weight").get_dtype()],
                    width=width,
                    inner=shape("tfmr.h.0.mlp.c_fc")[1],
                    n_layers=len({one[1] for name in names if (one := _LAYER.match(name))}),
                    n_ids=n_ids,
                    n_text_ids=shape("text_emb")[0],
                    n_places=shape("tfmr.wpe")[0],
                )
        except OSError as error:
            raise BadInputError(f"cannot read {file}: {error}") from error
        except (SafetensorError, KeyError, IndexError, ValueError) as error:
            raise BadInputError(f"{file} is no T3 of Chatterbox Turbo: {error}") from error


class ChatterboxTurbo:
    thinker = recogniser = voice = None
    talker = "sglang_live.models.chatterbox_turbo.parts:TurboTalker"
    decoder = "sglang_live.models.chatterbox.decoder:ChatterboxDecoder"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return not set(WEIGHTS).isdisjoint(config.get("files", ()))

    def facts(self, path: Path) -> ModelFacts:
        spec = TurboSpec.load(path)
        if spec.width % HEAD_DIM:
            raise BadInputError(f"{spec.weights}: {spec.width} is no width of heads of {HEAD_DIM}")
        for name in (TOKENIZER, MEAN_WEIGHTS):
            if not (path / name).is_file():
                raise BadInputError(f"{path / name} is missing: it belongs to Chatterbox Turbo")
        return ModelFacts(
            path=path,
            family=__name__,
            weights=path,
            stages=("talker", "vocoder"),
            talker_reads_text=True,
            least_recorded_s=LEAST_RECORDED_S,
            **voice_facts(path, MEAN_WEIGHTS),
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        check_number(flag, n_ranks)
        if stage == "talker" and n_ranks > 1:
            # SGLang's attention of GPT-2 keeps the KV of all heads in each rank.
            raise BadInputError(f"{flag}: the layers of Chatterbox Turbo have one rank")


FAMILY = ChatterboxTurbo()
