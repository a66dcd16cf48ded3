"""The config of a Qwen3-TTS talker as SGLang reads it: a dense Qwen3 over codec ids."""

from pathlib import Path
from typing import Any

from sglang_live.models.speech_lm.stage_view import view_of_talker

TALKER_ARCHITECTURE = "Qwen3TTSTalker"
PREFIXES = ("talker.",)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict[str, Any]) -> dict[str, Any]:
    talker = dict(config["talker_config"])
    return {
        **{key: value for key, value in talker.items() if key != "code_predictor_config"},
        "model_type": "qwen3",
        "architectures": [TALKER_ARCHITECTURE],
        # Text and frames advance all three axes of the talker's rotary embedding together, which
        # is the plain rotary embedding.
        "rope_scaling": None,
        "eos_token_id": talker["codec_eos_token_id"],
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "talker": {
            **talker,
            "tts_bos_token_id": config["tts_bos_token_id"],
            "tts_pad_token_id": config["tts_pad_token_id"],
        },
    }
