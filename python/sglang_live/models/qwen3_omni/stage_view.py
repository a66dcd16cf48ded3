"""A directory in which SGLang sees only the talker of a Qwen3-Omni checkpoint, whose config it
takes for the thinker's."""

from pathlib import Path

from sglang_live.models.speech_lm.stage_view import view_of_talker

TALKER_ARCHITECTURE = "Qwen3OmniTalker"
# The talker projects text through the thinker's embedding table.
THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"
PREFIXES = ("talker.", THINKER_EMBEDDING)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    return view_of_talker(checkpoint, cache, _talker_config, PREFIXES)


def _talker_config(config: dict) -> dict:
    talker, thinker = config["talker_config"], config["thinker_config"]
    text = dict(talker["text_config"])
    rope = text.pop("rope_parameters", None) or {}
    return {
        **text,
        "model_type": "qwen3_moe",
        "architectures": [TALKER_ARCHITECTURE],
        "num_experts": text.get("num_experts") or text["num_local_experts"],
        "rope_theta": rope.get("rope_theta") or text["rope_theta"],
        # Text and audio advance all three axes of the talker's rotary embedding together, which
        # is the plain rotary embedding. Images would not: they are refused in the gateway.
        "rope_scaling": None,
        "eos_token_id": talker["codec_eos_token_id"],
        "bos_token_id": None,
        "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        "talker": {
            **{k: v for k, v in talker.items() if k != "text_config"},
            "thinker_vocab_size": thinker["text_config"]["vocab_size"],
            "tts_bos_token_id": config["tts_bos_token_id"],
            "tts_pad_token_id": config["tts_pad_token_id"],
        },
    }
