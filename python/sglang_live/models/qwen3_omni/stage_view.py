"""A directory in which SGLang sees only the talker of a Qwen3-Omni checkpoint.

SGLang sizes its KV pool and chooses the model class by config.json, and takes a Qwen3-Omni config
for the thinker's. The view has a config of the talker alone and links to its shards.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open

TALKER_ARCHITECTURE = "Qwen3OmniTalker"
# The talker projects text through the thinker's embedding table.
THINKER_EMBEDDING = "thinker.model.embed_tokens.weight"
PREFIXES = ("talker.", THINKER_EMBEDDING)


def talker_view(checkpoint: Path, cache: Path) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race."""
    checkpoint = checkpoint.resolve()
    stamp = f"{checkpoint}:{(checkpoint / 'config.json').stat().st_mtime_ns}"
    view = cache / f"talker-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if (view / "config.json").exists():
        return view
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="view-", dir=cache))
    try:
        _write(checkpoint, scratch)
        os.replace(scratch, view)
    except OSError:
        if not (view / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return view


def shards_with(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, str]:
    """Weight name -> shard file name, for the weights whose name starts with one of prefixes."""
    index = checkpoint / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        weight_map = {}
        for shard in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(shard, "pt") as tensors:
                weight_map.update(dict.fromkeys(tensors.keys(), shard.name))
    return {name: shard for name, shard in weight_map.items() if name.startswith(prefixes)}


def _write(checkpoint: Path, view: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (view / "config.json").write_text(json.dumps(_talker_config(config), indent=2))
    weight_map = shards_with(checkpoint, PREFIXES)
    index = {"metadata": {}, "weight_map": weight_map}
    (view / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in set(weight_map.values()):
        (view / shard).symlink_to(checkpoint / shard)


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
