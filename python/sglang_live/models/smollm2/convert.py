"""Convert the GGUF file of SmolLM2 Instruct to a directory that SGLang and transformers load.

    python -m sglang_live.models.smollm2.convert FILE DIRECTORY

The directory appears complete, by one rename, so processes may race. A failure leaves nothing,
prints one line, and its status is 1.
"""

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang_live.errors import LiveError
from sglang_live.models.smollm2 import location
from sglang_live.models.smollm2.gguf_file import GgufFile
from sglang_live.models.smollm2.tokenizer import chat_template, tokenizer_config, tokenizer_of
from sglang_live.models.smollm2.weights import config_of, weights_of

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
