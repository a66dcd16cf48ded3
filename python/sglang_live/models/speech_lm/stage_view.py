"""A directory in which SGLang sees only the talker of a checkpoint.

SGLang sizes its KV pool and chooses the model class by config.json. The view has a config of the
talker alone and links to its shards.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open


def view_of_talker(
    checkpoint: Path,
    cache: Path,
    config_of: Callable[[dict[str, Any]], dict[str, Any]],
    prefixes: tuple[str, ...],
) -> Path:
    """The view of `checkpoint` under `cache`, made when absent. Safe when processes race.

    Args:
        config_of: the talker's config from the checkpoint's.
        prefixes: of the names of its weights.
    """
    checkpoint = checkpoint.resolve()
    stamp = f"{checkpoint}:{(checkpoint / 'config.json').stat().st_mtime_ns}"
    view = cache / f"talker-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if (view / "config.json").exists():
        return view
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="view-", dir=cache))
    try:
        config = config_of(json.loads((checkpoint / "config.json").read_text("utf-8")))
        (scratch / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
        _link_weights(checkpoint, scratch, prefixes)
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
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
    else:
        weight_map = {}
        for shard in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(shard, "pt") as tensors:
                weight_map.update(dict.fromkeys(tensors.keys(), shard.name))
    return {name: shard for name, shard in weight_map.items() if name.startswith(prefixes)}


def _link_weights(checkpoint: Path, view: Path, prefixes: tuple[str, ...]) -> None:
    weight_map = shards_with(checkpoint, prefixes)
    index = {"metadata": {}, "weight_map": weight_map}
    (view / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    for shard in set(weight_map.values()):
        (view / shard).symlink_to(checkpoint / shard)
