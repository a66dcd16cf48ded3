"""The tokenizer's files from the vocabulary, the merges and the chat template of a GGUF file."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_live.models.smollm2.gguf_file import GgufFile

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
