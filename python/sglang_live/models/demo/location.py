"""Locations of the demo models; cheap to import, unlike the code that builds one."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_live.environment import cache_directory

# Increase it when the recipe changes, so that caches are rebuilt.
RECIPE = 5

# Names for --model-path: the trained model, and one with random weights, for tests and load tests.
DEMO, DEMO_RANDOM = "demo", "demo-random"
TRAINED = Path(__file__).with_name("trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSize:
    """Width and depth of the parts. The heads of both encoders have 16 channels."""

    vocab: int = 1024
    hidden: int = 64
    head_dim: int = 16
    encoder_hidden: int = 32
    encoder_layers: int = 2
    encoder_channels: int = 16
    vision_hidden: int = 32
    thinker_layers: int = 4
    talker_layers: int = 2
    predictor_layers: int = 2
    codec_hidden: int = 64
    decoder_dim: int = 64
    codebook_size: int = 2048
    codec_window: int = 72
    seed: int = 20260101
    # Logits of the end tokens over a constant channel; the rest are about N(0, 1).
    thinker_end_logit: float = 2.2
    talker_end_logit: float = 2.8


def default_directory(size: DemoSize | None = None, cache: Path | None = None) -> Path:
    """Directory of a random demo model in `cache`; the default is environment.cache_directory."""
    return cache_directory(cache) / _name(size or DemoSize())


def _name(size: DemoSize) -> str:
    text = json.dumps([RECIPE, asdict(size)], sort_keys=True)
    return f"demo-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def is_demo(directory: str) -> bool:
    """Whether the directory is the trained demo model, or the random one of any cache."""
    path = Path(directory)
    return path == TRAINED or path.name == _name(DemoSize())
