"""Convert the GGUF file of SmolLM2 Instruct to a directory that SGLang and transformers load.

    python -m sglang_live.models.smollm2.convert FILE DIRECTORY

The directory appears complete, by one rename, so processes may race. A failure leaves nothing,
prints one line, and its status is 1.

llama.cpp rotates adjacent channels of a head, transformers and SGLang rotate channel i with
channel i + head_dim / 2. Its conversion therefore permutes the rows of q and k; that is undone.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_live.errors import BadInputError, LiveError
from sglang_live.models.smollm2 import location

Value = TypeVar("Value")
Floats = npt.NDArray[np.float32]


class GgufFile:
    """
    Raises:
        BadInputError: the file is not GGUF, or is cut.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path):
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        # What the reader raises depends on where the file ends.
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise BadInputError(f"{path} is not a GGUF file, or is cut: {error}") from error

    def error(self, fault: str) -> BadInputError:
        return BadInputError(f"{self._path}: {fault}")

    def value(self, key: str, kind: type[Value]) -> Value:
        """Raises BadInputError if there is no such value of this type."""
        field = self._reader.get_field(key)
        value = None if field is None else field.contents()
        if type(value) is not kind:
            found = "is missing" if field is None else f"is of type {type(value).__name__}"
            raise self.error(f"{key} {found}; expected: {kind.__name__}")
        return value

    def keys_of(self, prefix: str) -> list[str]:
        return [key for key in self._reader.fields if key.startswith(prefix)]

    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Name and dequantised values of each tensor, rows first; copies, one at a time."""
        for tensor in self._reader.tensors:
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise self.error(
                    f"{tensor.name} is of type {tensor.tensor_type.name}, which is not read"
                ) from error
            yield tensor.name, np.array(values, np.float32)


_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL = 1, 3
# Names that transformers knows, by those of GGUF.
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
START, END = "<|im_start|>", "<|im_end|>"


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Byte-level BPE whose digits are tokens of their own, as published for SmolLM2.

    Raises:
        BadInputError: the file has another kind of tokenizer.
    """
    for key, expected in (("model", "gpt2"), ("pre", "smollm")):
        if (found := file.value(_KEY + key, str)) != expected:
            raise file.error(f"{_KEY}{key} is {found}; only {expected} is converted")
    for key in ("add_bos_token", "add_space_prefix"):
        if file.value(_KEY + key, bool):
            raise file.error(f"{_KEY}{key} is true; only tokenizers without it are converted")
    tokens = _tokens(file)
    types = file.value(f"{_KEY}token_type", list)
    if len(types) != len(tokens) or not set(types) <= {_NORMAL, _CONTROL}:
        raise file.error(f"{_KEY}token_type: all tokens must be normal or control tokens")
    vocabulary = {token: at for at, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in file.value(f"{_KEY}merges", list)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise file.error(f"{_KEY}merges: {' '.join(merge)!r} does not join two tokens to one")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    if not {START, END} <= set(control):
        raise file.error(f"{START} and {END} must be control tokens")
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json, without the template.

    Raises:
        BadInputError: a special token has no id, or responses end with another than END.
    """
    tokens = _tokens(file)
    special = {}
    for theirs, ours in _ROLES.items():
        token_id = file.value(f"{_KEY}{theirs}_token_id", int)
        if token_id >= len(tokens):
            raise file.error(f"{_KEY}{theirs}_token_id is {token_id} of {len(tokens)} tokens")
        special[ours] = tokens[token_id]
    if special["eos_token"] != END:
        raise file.error(f"responses end with {special['eos_token']}, not with {END}")
    return {
        # A class of its own name (the published one is GPT2Tokenizer) would build another
        # pre-tokenizer than tokenizer.json has, one that keeps digits together.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "additional_special_tokens": [START, END],
        "model_max_length": file.value("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }


def chat_template(file: GgufFile) -> str:
    return file.value("tokenizer.chat_template", str)


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.value(f"{_KEY}tokens", list)
    if len(set(tokens)) != len(tokens) or len(tokens) != file.value("llama.vocab_size", int):
        raise file.error(f"{_KEY}tokens: each token of the vocabulary must be there once")
    return tokens


_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
}
_FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}


def config_of(file: GgufFile) -> dict[str, Any]:
    """The content of config.json.

    Raises:
        BadInputError: the model is not a plain Llama.
    """
    architecture = file.value("general.architecture", str)
    if architecture != "llama":
        raise file.error(f"the architecture is {architecture}, not llama")
    # Scaled rotations, experts and other variants have settings of their own.
    known = {f"llama.{name}" for name in (*_SIZES, *_FLOATS)}
    for key in file.keys_of("llama."):
        if key not in known:
            raise file.error(f"{key} is a setting of a model that is not converted")
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {ours: file.value(f"llama.{theirs}", int) for theirs, ours in _SIZES.items()}
    for theirs, ours in _FLOATS.items():
        # The shortest decimal of the float32: 1e-05 and not 9.999999747378752e-06.
        config[ours] = float(str(np.float32(file.value(f"llama.{theirs}", float))))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if config["head_dim"] * heads != config["hidden_size"] or heads % kv_heads:
        raise file.error("the sizes of its attention heads do not fit together")
    return config | {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensor_names(),
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id", int),
        "torch_dtype": "bfloat16",
        # models/stand_ins.py; an apology is no reason to call an application's function.
        "gives_up": "I'm sorry",
        "stands_for": "delegate",
    }


def weights_of(file: GgufFile, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """bfloat16 weights by their names in transformers.

    Raises:
        BadInputError: a tensor is missing, or has another shape, or is not of this model.
    """
    names = _names(config)
    weights: dict[str, torch.Tensor] = {}
    for name, values in file.tensors():
        if name not in names:
            raise file.error(f"{name} is not a tensor of this model")
        target, shape = names.pop(name)
        if values.shape != shape:
            raise file.error(f"{name} has the shape {values.shape} instead of {shape}")
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            values = unpermute(values, config["head_dim"])
        weights[target] = torch.from_numpy(values).to(torch.bfloat16)
    if names:
        raise file.error(f"{len(names)} tensors are missing, {next(iter(names))} among them")
    return weights


def unpermute(values: Floats, head_dim: int) -> Floats:
    """Order rows [n_heads * head_dim, n_in] of q or k as transformers does.

    Within a head, rows 0, 2, 4, … come first, then rows 1, 3, 5, …
    """
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name in transformers and shape of each tensor, by its name in the file."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    n_kv = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (hidden, hidden)),
        "attn_k": ("self_attn.k_proj", (n_kv, hidden)),
        "attn_v": ("self_attn.v_proj", (n_kv, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, hidden)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
        "ffn_up": ("mlp.up_proj", (inner, hidden)),
        "ffn_down": ("mlp.down_proj", (hidden, inner)),
    }
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (config["vocab_size"], hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if not config["tie_word_embeddings"]:
        names["output.weight"] = ("lm_head.weight", (config["vocab_size"], hidden))
    for at in range(config["num_hidden_layers"]):
        for theirs, (ours, shape) in layer.items():
            names[f"blk.{at}.{theirs}.weight"] = (f"model.layers.{at}.{ours}.weight", shape)
    return names


# As its authors recommend: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(path: Path, directory: Path) -> None:
    """Write the files into the directory, unless it has them.

    Args:
        directory: absent or empty, or converted before.
    Raises:
        BadInputError: the file is not GGUF, or holds another kind of model.
        LiveError: the directory has other files.
        OSError: a file cannot be read or written.
    """
    if _is_done(directory):
        return
    file = GgufFile(path)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename works within one file system only.
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        made = scratch / "model"
        made.mkdir()
        _write(file, made)
        try:
            made.rename(directory)
        except OSError:
            # Another process finished first: its result is the same.
            if not _is_done(directory):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_done(directory: Path) -> bool:
    """Raises LiveError if the directory has other files."""
    if location.is_converted(directory):
        return True
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise LiveError(f"{directory} is not a converted model: delete it, or name another one")
    return False


def _write(file: GgufFile, directory: Path) -> None:
    config = config_of(file)
    _write_json(directory / location.CONFIG, config)
    generation = {name: config[name] for name in _IDS} | _SAMPLING
    _write_json(directory / location.GENERATION, generation)
    _write_json(directory / location.TOKENIZER_CONFIG, tokenizer_config(file))
    (directory / location.TEMPLATE).write_text(chat_template(file), "utf-8")
    (directory / location.TOKENIZER).write_text(tokenizer_of(file).to_str(pretty=True), "utf-8")
    # transformers asks for the format.
    weights = directory / location.WEIGHTS
    save_file(weights_of(file, config), weights, metadata={"format": "pt"})
    # safetensors lets only its own user read the file.
    shutil.copymode(directory / location.CONFIG, weights)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="of the fetched package")
    parser.add_argument("directory", type=Path, help="to be made")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # engines of other processes may compute
    try:
        convert(given.file, given.directory)
    except (LiveError, OSError) as error:
        print(f"SmolLM2 is not converted: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # An end of the server removes the scratch directory, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
