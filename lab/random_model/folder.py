"""Make the folder of a model whose weights are random: configuration and tokenizer, no weights.

    python -m lab.random_model.folder --scale published --out DIR

The architecture is Qwen3-Omni's in the sizes of Qwen3-Omni-30B-A3B, or the same one tiny. The
tokenizer is the demo model's, so that nothing is downloaded. attach.py makes the weights.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

# In the folder: what attach.py needs to know of it.
FACTS = "random_weights.json"

_TEXT = {
    "norm_topk_prob": True,
    "head_dim": 128,
    "max_position_embeddings": 65_536,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}
# config.json of Qwen/Qwen3-Omni-30B-A3B-Instruct, where the demo model's differs.
_PUBLISHED = {
    "dtype": "bfloat16",
    "thinker_config": {
        "dtype": "bfloat16",
        "text_config": {
            **_TEXT,
            "vocab_size": 152_064,
            "hidden_size": 2048,
            "intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "num_hidden_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "output_dim": 2048,
            "downsample_hidden_size": 480,
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "talker_config": {
        "text_config": {
            **_TEXT,
            "vocab_size": 3072,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 20,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 384,
            "num_local_experts": 128,
            "num_experts_per_tok": 6,
            "shared_expert_intermediate_size": 768,
        },
        "code_predictor_config": {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_types": ["full_attention"] * 5,
        },
        "thinker_hidden_size": 2048,
        "accept_hidden_layer": 24,
    },
    "code2wav_config": {
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 3072,
        "decoder_dim": 1536,
        "sliding_window": 72,
    },
}
# What one CPU core computes: the demo model's sizes, with experts of which few are active.
_TINY = {
    "thinker_config": {"text_config": {"num_experts": 16, "num_experts_per_tok": 4}},
    "talker_config": {"text_config": {"num_local_experts": 16, "num_experts_per_tok": 3}},
}
SCALES: Mapping[str, Mapping[str, Any]] = {"published": _PUBLISHED, "tiny": _TINY}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    Attributes:
        seed: of the weights.
        spoken_ids: tokens that the thinker samples; whole words, so never an end.
        frames_per_token: codec frames after which the talker ends, for each token of its text.
            English takes 3.7.
    """

    seed: int = 1
    spoken_ids: tuple[int, ...] = ()
    frames_per_token: float = 3.7

    def __post_init__(self) -> None:
        if self.frames_per_token < 1:
            raise ValueError("frames_per_token is at least 1: the talker waits for its text")

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises OSError: the folder is not one of a random model."""
        found = json.loads((folder / FACTS).read_text("utf-8"))
        return cls(**{**found, "spoken_ids": tuple(found["spoken_ids"])})


def is_random_model(folder: Path) -> bool:
    return (folder / FACTS).is_file()


def make(folder: Path, scale: str, facts: Facts = Facts()) -> None:
    """Write the model's folder; `facts` without its tokens."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    from sglang_live.models.demo.build import build_tokenizer, config_of, save_processor
    from sglang_live.models.demo.location import DemoSize

    size = DemoSize()
    tokenizer = build_tokenizer(size.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    save_processor(tokenizer, folder)
    # Ids of special tokens, of codes and of speakers are the same in both.
    config = merged(config_of(tokenizer, size).to_dict(), SCALES[scale])
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    save_file({}, folder / "model.safetensors")  # a server refuses a folder without weights
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = {"temperature": 0.9, "top_k": 50}
    GenerationConfig(eos_token_id=end, do_sample=True, **sampling).save_pretrained(folder)
    tokens = enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
    words = tuple(n for n, token in tokens if token[0] == "Ġ" and token[1:].isalpha())
    known = asdict(facts) | {"spoken_ids": words}
    (folder / FACTS).write_text(json.dumps(known) + "\n", "utf-8")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the changes, dictionaries inside one another likewise."""
    result = dict(base)
    for key, value in changes.items():
        inner = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        result[key] = merged(base[key], value) if inner else value
    return result


def ensure_made(folder: Path, scale: str) -> Path:
    """The folder, made if absent. Concurrent calls are safe."""
    if not is_random_model(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="making-", dir=folder.parent))
        try:
            make(scratch, scale)
            os.replace(scratch, folder)
        except OSError:
            if not is_random_model(folder):
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=[*SCALES], default="published")
    parser.add_argument("--out", type=Path, required=True, help="directory")
    args = parser.parse_args()
    make(args.out, args.scale)
    print(args.out)


if __name__ == "__main__":
    main()
