"""The parts as one checkpoint directory, in the published layout and half precision.

Every trained part is a shard of its own: training it again replaces one file, and a training can
begin with the parts of another.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeForConditionalGeneration,
)

from sglang_live.models.demo.build import build_tokenizer, config_of, save_processor
from sglang_live.sound.clip_form import CONFIG_KEY
from training.demo.sizes import GOOD_TOKENS, SIZE
from training.demo.world import UNKNOWN

EMBEDDING_STD = 0.3
# What of Room.random (acoustics.py) the model relies on: most recordings have this much silence.
CLIP_FORM = {"before_s": 0.3, "after_s": 0.5, "least_peak": 0.03}
# Shards and the prefixes of their weights; a weight belongs to the longest prefix that fits.
PARTS = {
    "vocoder": "code2wav.",
    "talker": "talker.",
    "hearing": "thinker.audio_tower.",
    "thinker": "thinker.",
}
_INDEX = "model.safetensors.index.json"
_EXPERTS = ".mlp.experts."


def blank_model(corpus: str) -> tuple[Qwen3OmniMoeForConditionalGeneration, object]:
    """An untrained model and its tokenizer. Token embeddings are final: random, never trained.

    So the thinker's parts and the talker can be trained separately on the same embeddings.
    """
    torch.manual_seed(SIZE.seed)
    tokenizer = build_tokenizer(SIZE.vocab, corpus)
    model = Qwen3OmniMoeForConditionalGeneration(config_of(tokenizer, SIZE)).float()
    noise = torch.Generator().manual_seed(SIZE.seed)
    with torch.no_grad():
        for weight in model.parameters():
            if not torch.isfinite(weight).all():
                weight.zero_()  # memory that transformers leaves unset
        weight = model.thinker.model.embed_tokens.weight
        weight.copy_(EMBEDDING_STD * torch.randn(weight.shape, generator=noise))
    return model, tokenizer


def save_part(model: nn.Module, part: str, directory: Path) -> None:
    weights = {n: w.detach().half() for n, w in model.state_dict().items() if _part_of(n) == part}
    published = {n: w.contiguous() for n, w in apart(weights).items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(published, directory / _shard(part), metadata={"format": "pt"})


def load_part(model: nn.Module, part: str, directory: Path) -> bool:
    """Load a part. Returns False if the directory has no such part.

    Raises:
        ValueError: if the part is of another model.
    """
    path = directory / _shard(part)
    if not path.exists():
        return False
    weights = together(load_file(path))
    wanted = {name for name in model.state_dict() if _part_of(name) == part}
    if weights.keys() != wanted:
        raise ValueError(f"{path} is of another model: {sorted(weights.keys() ^ wanted)[:3]}")
    model.load_state_dict(weights, strict=False)
    return True


def complete(model: Qwen3OmniMoeForConditionalGeneration, tokenizer, directory: Path) -> None:
    """Write the files of a checkpoint besides its parts.

    Decoding is greedy (top_k 1): each question has one answer.
    """
    model.config.dtype = torch.float16
    model.config.good_tokens = GOOD_TOKENS
    model.config.gives_up = UNKNOWN
    setattr(model.config.thinker_config, CONFIG_KEY, CLIP_FORM)
    model.config.thinker_config.live_one_utterance = True
    model.config.talker_config.live_speaks = "english words"
    model.config.save_pretrained(directory)
    weight_map = {name: _shard(_part_of(name)) for name in apart(model.state_dict())}
    size = sum((directory / shard).stat().st_size for shard in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=1) + "\n", "utf-8")
    save_processor(tokenizer, directory)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    GenerationConfig(eos_token_id=end, do_sample=True, temperature=0.1, top_k=1).save_pretrained(
        directory
    )


def apart(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights with each expert under its own name, as in published checkpoints.

    In memory the experts of a layer are stacked: gate_up_proj [experts, 2 * intermediate, hidden]
    and down_proj [experts, hidden, intermediate].
    """
    found = {}
    for name, weight in weights.items():
        layer, _, kind = name.partition(_EXPERTS)
        for number in range(len(weight) if kind else 0):
            own = f"{layer}{_EXPERTS}{number}"
            if kind == "gate_up_proj":
                gate, up = weight[number].chunk(2)
                found |= {f"{own}.gate_proj.weight": gate, f"{own}.up_proj.weight": up}
            else:
                found[f"{own}.{kind}.weight"] = weight[number]
        if not kind:
            found[name] = weight
    return found


def together(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `apart`."""
    found, experts = {}, defaultdict(dict)
    for name, weight in weights.items():
        layer, _, own = name.partition(_EXPERTS)
        if own:
            number, kind, _ = own.split(".")
            experts[layer][int(number), kind] = weight
        else:
            found[name] = weight
    for layer, own in experts.items():
        numbers = sorted({number for number, _ in own})
        gate_up = [torch.cat([own[n, "gate_proj"], own[n, "up_proj"]]) for n in numbers]
        down = [own[n, "down_proj"] for n in numbers]
        found[f"{layer}{_EXPERTS}gate_up_proj"] = torch.stack(gate_up)
        found[f"{layer}{_EXPERTS}down_proj"] = torch.stack(down)
    return found


def _shard(part: str) -> str:
    return f"{part}.safetensors"


def _part_of(name: str) -> str:
    fitting = (part for part, prefix in PARTS.items() if name.startswith(prefix))
    return max(fitting, key=lambda part: len(PARTS[part]))
