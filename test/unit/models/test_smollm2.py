"""A converted SmolLM2 computes what its GGUF file says; the files are tiny and written here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from sglang_live.models.cascade.parts import TemplatePrompt
from sglang_live.models.smollm2.convert import main
from sglang_live.models.smollm2.location import FILES, converted_directory, is_converted

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
BASE, EPS = 100000.0, 1e-5
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2", "a n"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt", "Ġthe", "12", "an"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


def tensors() -> dict[str, np.ndarray]:
    noise = np.random.default_rng(7)
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    n_kv = KV_HEADS * HEAD_DIM
    for at in range(LAYERS):
        shapes |= {
            f"blk.{at}.attn_norm.weight": (HIDDEN,),
            f"blk.{at}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{at}.attn_k.weight": (n_kv, HIDDEN),
            f"blk.{at}.attn_v.weight": (n_kv, HIDDEN),
            f"blk.{at}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{at}.ffn_norm.weight": (HIDDEN,),
            f"blk.{at}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{at}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{at}.ffn_down.weight": (HIDDEN, INNER),
        }
    scales = {name: 0.2 if len(shape) == 2 else 1.0 for name, shape in shapes.items()}
    return {
        name: (noise.standard_normal(shape) * scales[name]).astype(np.float32)
        for name, shape in shapes.items()
    }


def write(path: Path, weights: dict[str, np.ndarray], **changes) -> Path:
    """Write a GGUF file; `changes` are other values of metadata, by key with __ for a point."""
    values = {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": len(TOKENS),
        "llama.rope.freq_base": BASE,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": TEMPLATE,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    adders = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in values.items():
        if value is not None:
            getattr(writer, f"add_{adders[type(value)]}")(key, value)
    for name, tensor in weights.items():
        kind = Q8_0 if name == "token_embd.weight" else Q4_1
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tensors())


@pytest.fixture(scope="module")
def directory(file) -> Path:
    target = file.parent / "parents" / "converted"
    assert main([str(file), str(target)]) == 0
    return target


def logits_of_file(file: Path, ids: list[int]) -> np.ndarray:
    """Logits [n, vocabulary] as llama.cpp defines the model, which rotates adjacent channels.

    The weights are those of the file, rounded to bfloat16.
    """
    w = {
        t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type)))
        .bfloat16()
        .double()
        .numpy()
        for t in gguf.GGUFReader(file).tensors
    }
    angles = np.outer(np.arange(len(ids)), BASE ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos, sin = np.cos(angles), np.sin(angles)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[name]

    def rotated(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def heads(x):
        return x.reshape(len(ids), -1, HEAD_DIM).swapaxes(0, 1)

    future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    x = w["token_embd.weight"][ids]
    for at in range(LAYERS):
        block = f"blk.{at}."
        y = norm(x, f"{block}attn_norm.weight")
        q, k, v = (heads(y @ w[f"{block}attn_{name}.weight"].T) for name in "qkv")
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=0) for each in (rotated(k), v))
        scores = np.exp(rotated(q) @ k.swapaxes(1, 2) / np.sqrt(HEAD_DIM) + future)
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + mixed.swapaxes(0, 1).reshape(len(ids), -1) @ w[f"{block}attn_output.weight"].T
        y = norm(x, f"{block}ffn_norm.weight")
        gate, up = y @ w[f"{block}ffn_gate.weight"].T, y @ w[f"{block}ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{block}ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, "output_norm.weight") @ head.T


@torch.no_grad()
def logits_of_directory(directory: Path, ids: list[int]) -> np.ndarray:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([ids])).logits[0].numpy()


def test_the_converted_model_computes_the_logits_of_the_file(file, directory):
    ids = np.random.default_rng(1).integers(len(TOKENS), size=40).tolist()
    expected = logits_of_file(file, ids)
    assert np.abs(expected).max() > 1
    assert np.abs(logits_of_directory(directory, ids) - expected).max() < 1e-4


def test_all_files_have_the_same_mode(directory):
    assert len({(directory / name).stat().st_mode for name in FILES}) == 1


def test_a_file_with_an_output_matrix_is_not_tied(tmp_path):
    weights = tensors()
    weights["output.weight"] = weights["token_embd.weight"][::-1].copy()
    file = write(tmp_path / "untied.gguf", weights)
    assert main([str(file), str(tmp_path / "made")]) == 0
    expected = logits_of_file(file, [7, 3, 9])
    assert np.abs(logits_of_directory(tmp_path / "made", [7, 3, 9]) - expected).max() < 1e-4


def test_the_configuration_is_that_of_the_file(directory):
    config = LlamaForCausalLM.from_pretrained(directory).config
    assert config.dtype == torch.bfloat16
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (EPS, BASE)
    assert (config.max_position_embeddings, config.vocab_size) == (512, len(TOKENS))
    assert config.tie_word_embeddings
    assert config.architectures == ["LlamaForCausalLM"]
    generation = GenerationConfig.from_pretrained(directory)
    assert (generation.eos_token_id, generation.bos_token_id) == (2, 1)
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.2, 0.9)


def test_the_tokenizer_joins_what_the_merges_say_but_no_digits(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS
    text = "he the\tan 12½é <|im_end|>the"
    said = ["he", "Ġthe", "ĉ", "an", "Ġ", "1", "2", "Â", "½", "Ã", "©", "Ġ", "<|im_end|>"]
    assert tokenizer.tokenize(text) == [*said, "t", "he"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (*special, tokenizer.unk_token_id) == (1, 2, 2, 0)


def test_conversations_can_be_appended_with_the_tokenizer(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == TEMPLATE
    [opening] = TemplatePrompt(tokenizer, [tokenizer.eos_token_id]).open_response()
    assert opening.text.endswith("assistant\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general__architecture": "qwen2"}, "qwen2"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama__context_length": None}, "llama.context_length is missing"),
        ({"llama__context_length": 512.0}, "llama.context_length is of type float"),
        ({"llama__rope__dimension_count": 8}, "sizes of its attention heads"),
        ({"llama__feed_forward_length": 64}, "blk.0.ffn_gate.weight has the shape (96, 64)"),
        ({"llama__block_count": 1}, "blk.1.attn_norm.weight is not a tensor"),
        ({"llama__block_count": 3}, "9 tensors are missing, blk.2."),
        ({"tokenizer__ggml__pre": "llama-bpe"}, "tokenizer.ggml.pre is llama-bpe"),
        ({"tokenizer__ggml__add_bos_token": True}, "add_bos_token"),
        ({"tokenizer__ggml__eos_token_id": 0}, "responses end with <|endoftext|>"),
        ({"tokenizer__ggml__unknown_token_id": 9999}, "unknown_token_id is 9999"),
        ({"tokenizer__ggml__tokens": ["a"] * len(TOKENS)}, "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__merges": ["h i"]}, "'h i' does not join"),
        ({"tokenizer__ggml__token_type": [6] * len(TOKENS)}, "token_type"),
    ],
)
def test_another_model_is_refused_in_one_line_and_leaves_nothing(
    tmp_path, capsys, changes, message
):
    file = write(tmp_path / "other.gguf", tensors(), **changes)
    capsys.readouterr()  # the writer logs, if another test has set up logs
    assert main([str(file), str(tmp_path / "made")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    assert os.listdir(tmp_path) == ["other.gguf"]


def test_a_file_that_is_cut_anywhere_is_refused_in_one_line(file, tmp_path, capsys):
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for n_bytes in {*range(0, len(whole), len(whole) // 60), 3, 20, 100, len(whole) - 1}:
        cut.write_bytes(whole[:n_bytes])
        assert main([str(cut), str(tmp_path / "made")]) == 1, n_bytes
        [line] = capsys.readouterr().err.splitlines()
        assert "cut.gguf" in line
    assert os.listdir(tmp_path) == ["cut.gguf"]


def test_a_missing_file_is_an_error_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none.gguf"), str(tmp_path / "made")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "none.gguf" in line


def test_what_is_converted_is_left_alone_and_other_files_too(directory, tmp_path, capsys):
    times = {name: (directory / name).stat().st_mtime_ns for name in FILES}
    assert main([str(tmp_path / "none.gguf"), str(directory)]) == 0
    assert times == {name: (directory / name).stat().st_mtime_ns for name in FILES}
    (tmp_path / "other").write_text("kept")
    assert main([str(tmp_path / "none.gguf"), str(tmp_path)]) == 1
    assert "delete it" in capsys.readouterr().err
    assert (tmp_path / "other").read_text() == "kept"


def test_processes_may_race(file, tmp_path):
    target = tmp_path / "made"
    command = [sys.executable, "-m", "sglang_live.models.smollm2.convert", file, target]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert is_converted(target)
    assert os.listdir(tmp_path) == ["made"]
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == LAYERS


def test_the_directory_of_the_pinned_package_lies_in_the_cache(tmp_path):
    assert converted_directory(tmp_path).parent == tmp_path
    assert converted_directory(tmp_path).name.startswith("smollm2-")
