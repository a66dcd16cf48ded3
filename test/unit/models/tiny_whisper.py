"""A tiny Whisper with random weights, for transformers and converted for CTranslate2."""

import itertools
from pathlib import Path

import torch
from ctranslate2.converters import TransformersConverter
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from sglang_live.models.whisper import byte_characters

LANGUAGES = ("en", "de", "ja")
_TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def build(path: Path, *, is_multilingual: bool = True) -> tuple[Path, Path]:
    """Returns the directories for transformers and for CTranslate2."""
    signs = byte_characters()
    marks = ["endoftext", "startoftranscript", *LANGUAGES, *_TASKS]
    special = [f"<|{name}|>" for name in marks] + [f"<|{n * 0.02:.2f}|>" for n in range(1501)]
    # CTranslate2 knows a model of many languages by its empty token.
    pairs = ["".join(pair) for pair in itertools.product(signs[:20], repeat=2)]
    written = [*signs, *pairs, *([""] if is_multilingual else [])]
    tokenizer = WhisperTokenizer(vocab={sign: n for n, sign in enumerate(written)}, merges=[])
    tokenizer.add_tokens(special, special_tokens=True)
    ids = {token: len(written) + n for n, token in enumerate(special)}
    assert tokenizer.convert_tokens_to_ids(special) == list(ids.values())
    end = ids["<|endoftext|>"]
    size = len(written) + len(special)
    torch.manual_seed(4)
    config = WhisperConfig(
        vocab_size=size,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        init_std=0.3,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
    )
    model = WhisperForConditionalGeneration(config).eval()
    settings = {
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "is_multilingual": is_multilingual,
        "suppress_tokens": [*range(end + 1, size)],
        "begin_suppress_tokens": [written.index("Ġ"), end],
        "max_length": 448,
        "alignment_heads": [[1, 0]],
    }
    if is_multilingual:
        settings |= {
            "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
            "task_to_id": {task: ids[f"<|{task}|>"] for task in _TASKS[:2]},
        }
    model.generation_config = GenerationConfig(**settings)
    plain, converted = path / "transformers", path / "ctranslate2"
    model.save_pretrained(plain)
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(plain)
    TransformersConverter(str(plain)).convert(str(converted))
    return plain, converted
