"""GLM-4's tokenizer as a fast one of transformers, without the code of its checkpoint.

The published one is a Python class over ranks of byte pairs, in tiktoken's form.
"""

import base64
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from sglang_live.errors import BadInputError
from sglang_live.models.glm4_voice.family import USER, GlmVoiceSpec

RANKS = "tokenizer.model"


class _Ranks(TikTokenConverter):
    """Its pattern of words is GPT-4's, as GLM-4's is."""

    @staticmethod
    def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
        """Raises BadInputError if the file is missing or broken."""
        try:
            lines = [line.split() for line in Path(path).read_text("utf-8").splitlines() if line]
            return {base64.b64decode(token): int(rank) for token, rank in lines}
        except (OSError, ValueError) as error:
            raise BadInputError(f"cannot read {path}: {error}") from error


def fast_tokenizer(checkpoint: Path) -> PreTrainedTokenizerFast:
    """All control tokens and codes are special: the text of a user never becomes one.

    Raises:
        BadInputError: a file is missing or broken.
    """
    special = GlmVoiceSpec.load(checkpoint).special
    names = {number: name for name, number in special.items()}
    made = _Ranks(str(checkpoint / RANKS)).converted()
    # Ids are given in order: the places of ids that no token has are taken by others.
    numbers = range(made.get_vocab_size(), 1 + max(names))
    if wrong := [name for number, name in names.items() if number not in numbers]:
        raise BadInputError(f"{checkpoint}: {wrong[0]} has the id of a word")
    tokens = (names.get(number, f"<|unused_{number}|>") for number in numbers)
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=USER)


def tokenizer_directory(checkpoint: Path, cache: Path) -> Path:
    """Its directory under `cache`, made when absent. Safe when processes race."""
    stamp = f"{checkpoint.resolve()}:{(checkpoint / RANKS).stat().st_mtime_ns}"
    directory = cache / f"tokenizer-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if directory.exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="tokenizer-", dir=cache))
    try:
        fast_tokenizer(checkpoint).save_pretrained(scratch)
        os.replace(scratch, directory)
    except OSError:
        if not directory.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory
