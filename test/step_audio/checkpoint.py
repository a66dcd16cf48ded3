"""A tiny random Step-Audio 2 mini in its published layout, with its decoder."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from test.step_audio import token2wav

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
N_CODES = 96
MERGES = (("t", "h"), ("th", "e"), ("a", "n"), ("an", "d"), ("i", "n"), ("l", "i"), ("Ġ", "the"))
# In the published order.
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<|BOT|>", "<|EOT|>", "<audio_start>", "<audio_end>", "<audio_patch>"),
    *("<tts_start>", "<tts_end>", "<tts_pad>"),
)
CODES = [f"<audio_{code}>" for code in range(N_CODES + 1)]
N_WORDS = 256 + len(MERGES)
FIRST_CODE = N_WORDS + len(CONTROL)
VOCAB = FIRST_CODE + len(CODES) + 5
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_attention_groups": KV_HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "max_seq_len": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "eos_token_id": N_WORDS,
    "pad_token_id": N_WORDS,
    "torch_dtype": "float32",
}
ENCODER = {
    "n_mels": 128,
    "n_audio_ctx": 1500,
    "n_audio_state": 48,
    "n_audio_head": 4,
    "n_audio_layer": 2,
    "n_codebook_size": 4096,
    "llm_dim": HIDDEN,
    "kernel_size": 3,
    "adapter_stride": 2,
}
CONFIG = {
    "architectures": ["StepAudio2ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_step_audio_2.StepAudio2Config"},
    "model_type": "step_audio_2",
    "torch_dtype": "float32",
    "text_config": TEXT,
    "audio_encoder_config": ENCODER,
}


def special() -> dict[int, str]:
    return {N_WORDS + n: name for n, name in enumerate((*CONTROL, *CODES))}


def _save_tokenizer(path: Path) -> None:
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*signs, *("".join(pair) for pair in MERGES)]
    vocab = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special().values()))
    made.save(str(path / "tokenizer.json"))
    kinds = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(n): {"content": name, "special": "tool_call" not in name, **kinds}
        for n, name in special().items()
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "eos_token": CONTROL[0],
        "pad_token": CONTROL[0],
        "bos_token": None,
        "unk_token": None,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def language_config() -> Qwen2Config:
    unknown = {"max_seq_len", "num_attention_groups", "eos_token_id", "torch_dtype"}
    known = {name: value for name, value in TEXT.items() if name not in unknown}
    return Qwen2Config(**known, tie_word_embeddings=False, eos_token_id=[])


@torch.no_grad()
def _weights() -> Iterator[tuple[str, Tensor]]:
    from sglang_live.models.step_audio.hearing import Hearing

    for name, tensor in Qwen2ForCausalLM(language_config()).state_dict().items():
        is_norm = "norm" in name
        scale = 0.1 if is_norm else 1.0 if "bias" in name or "embed" in name else 0.2
        made = is_norm + scale * torch.randn(tensor.shape)
        if name == "lm_head.weight":
            made *= 5
            # It ends no response, and writes words and codes alone.
            silent = [n for n in range(VOCAB) if n >= N_WORDS and not 0 <= n - FIRST_CODE < N_CODES]
            made[silent] = 0.0
        yield name, made
    for name, tensor in Hearing(ENCODER).state_dict().items():
        is_norm = "ln.weight" in name or "norm.weight" in name
        scale = 0.1 if tensor.ndim == 1 else 2.0 / tensor[0].numel() ** 0.5
        yield name, is_norm + scale * torch.randn(tensor.shape)


def build(path: Path) -> Path:
    """Returns the checkpoint's directory."""
    torch.manual_seed(5)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    _save_tokenizer(path)
    save_file(dict(_weights()), path / "model.safetensors")
    token2wav.save(path / "token2wav")
    return path
