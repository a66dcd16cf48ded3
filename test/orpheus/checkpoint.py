"""A tiny random Orpheus in the published layout, with its vocabulary, and SNAC beside it.

Its weights are made so that, as a trained model, it writes each code in its place of a frame: what
the embedding of a code says of the place, no layer changes, and the head reads it.
"""

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_live.models.orpheus.family import (
    CODEBOOK_SIZE,
    CODES_PER_FRAME,
    END_OF_CODES_ID,
    FIRST_CODE_ID,
    SPEECH_BEGIN_ID,
    SPEECH_END_ID,
    STOP_IDS,
    OrpheusTalker,
)
from test.orpheus import tiny_snac

VOCABULARY = END_OF_CODES_ID + 2
_BEGIN_OF_TEXT_ID, _FIRST_MARK_ID = 128_000, 128_256
# Dimensions of the embedding that say at which place of a frame a code is, and that it is the last.
_LAST = CODES_PER_FRAME
_TOLD = slice(0, CODES_PER_FRAME + 1)
# In embedding and head: what no penalty and no other dimension outweighs.
_CLEAR = 12.0


def build(path: Path, end_every: int = 24, **config) -> Path:
    """Returns the checkpoint's directory.

    end_every: frames of an utterance on average.
    config: changes of config.json.
    """
    torch.manual_seed(11)
    settings = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=_BEGIN_OF_TEXT_ID,
        eos_token_id=128_009,
    )
    model = LlamaForCausalLM(settings).eval()
    with torch.no_grad():
        _tell_places(model, end_every)
    model.save_pretrained(path)
    if config:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    _tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>"})
    )
    snac = tiny_snac.tiny_module(codebook_size=CODEBOOK_SIZE)
    config_of_snac = tiny_snac.CONFIG | {"codebook_size": CODEBOOK_SIZE}
    tiny_snac.save_checkpoint(path / "snac", snac, config_of_snac)
    return path


def _tell_places(model: LlamaForCausalLM, end_every: int) -> None:
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding[:, _TOLD] = 0.0
    head.zero_()
    for place in range(CODES_PER_FRAME):
        first = FIRST_CODE_ID + place * CODEBOOK_SIZE
        of_place = slice(first, first + CODEBOOK_SIZE)
        embedding[of_place, place] = _CLEAR
        head[of_place].normal_()
        head[of_place, _TOLD] = 0.0
        head[of_place, (place - 1) % CODES_PER_FRAME] = _CLEAR
    embedding[SPEECH_BEGIN_ID, CODES_PER_FRAME - 1] = _CLEAR
    # Some codes of the last place have the end behind them.
    embedding[END_OF_CODES_ID - CODEBOOK_SIZE : END_OF_CODES_ID : end_every, _LAST] = _CLEAR
    head[SPEECH_END_ID, _LAST] = 2 * _CLEAR
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[_TOLD] = 0.0
        layer.mlp.down_proj.weight[_TOLD] = 0.0


class Reference:
    """The checkpoint in transformers and in SNAC's package."""

    def __init__(self, path: Path):
        self.talker = OrpheusTalker(path)
        self._model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._snac = tiny_snac.tiny_module(codebook_size=CODEBOOK_SIZE)

    def codes(self, text: str, most_frames: int, voice: str = "tara") -> np.ndarray:
        """[n_frames, 7] of one piece, the most likely ones, with the penalty of repetitions."""
        prompt = self.talker.prompt(voice, text)
        written = self._model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            repetition_penalty=self.talker.sampling["repetition_penalty"],
            max_new_tokens=most_frames * CODES_PER_FRAME,
            eos_token_id=list(STOP_IDS),
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        if written[-1] in STOP_IDS:
            del written[-1]
        n_frames = len(written) // CODES_PER_FRAME
        ids = np.array(written[: n_frames * CODES_PER_FRAME]).reshape(-1, CODES_PER_FRAME)
        return ids - FIRST_CODE_ID - CODEBOOK_SIZE * np.arange(CODES_PER_FRAME)

    def wave(self, codes: np.ndarray) -> torch.Tensor:
        return tiny_snac.whole_wave(self._snac, torch.from_numpy(codes))


def _tokenizer() -> Tokenizer:
    """Of bytes. Its other ids have names only, as most of them in these tests."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<filler_{n}>" for n in range(len(names), _FIRST_MARK_ID)]
    names[_BEGIN_OF_TEXT_ID] = "<|begin_of_text|>"
    names += [f"<custom_token_{n}>" for n in range(END_OF_CODES_ID - _FIRST_MARK_ID)]
    vocabulary = {name: n for n, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", _BEGIN_OF_TEXT_ID)],
    )
    special = [names[_BEGIN_OF_TEXT_ID], names[FIRST_CODE_ID], names[END_OF_CODES_ID - 1]]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer
