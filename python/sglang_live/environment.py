"""What the environment of a program may lack: a home, a folder for derived files, UTF-8."""

import codecs
import errno
import locale
import logging
import os
import sys
import tempfile
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from sglang_live.errors import BadInputError
from sglang_live.settings import Settings, flag

log = logging.getLogger(__name__)

CACHE_ENV = "SGLANG_LIVE_CACHE"
PROBE_BYTES = 1 << 16
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def start_in_utf8_mode() -> None:
    """Start this program again in Python's UTF-8 mode, in a locale such as C that is ASCII alone.

    Python does so by itself unless PYTHONUTF8 or PYTHONCOERCECLOCALE forbids it. Arguments, names
    of files and what child processes read would be strings that cannot be sent or encoded.
    """
    if codecs.lookup(locale.getencoding()).name != "ascii" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def cache_directory(given: str | Path | None = None) -> Path:
    """`given`, else $SGLANG_LIVE_CACHE, else ~/.cache/sglang_live.

    Raises:
        BadInputError: neither is given, and the user has no home: an account without an entry.
    """
    if named := given or os.environ.get(CACHE_ENV):
        return Path(named)
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        raise BadInputError(
            "--cache-dir: this user has no home: name a folder that can be written, with this "
            f"flag or in {CACHE_ENV}"
        )
    return home / ".cache" / "sglang_live"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderConfig(Settings):
    """What a server writes besides its answers."""

    cache_dir: Path = flag(
        MISSING,
        "derived and downloaded files",
        factory=cache_directory,
        env=CACHE_ENV,
        unset="~/.cache/sglang_live",
    )
    log_dir: Path | None = flag(None, "write stage logs to files in this folder, not to stderr")
    log_format: Literal["text", "json"] = flag(
        "text", "json: one object a line on stderr and in log files"
    )
    timeline_dir: Path | None = flag(
        None, "write a timeline of every session to a file in this folder"
    )


def check_cache_folder(folder: Path) -> None:
    """Make the folder if it is absent, and check that it can be written.

    A full disk is only logged, because the folder may hold all that the server needs.

    Raises:
        BadInputError: the path is no folder, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder, PROBE_BYTES)
    except OSError as error:
        if error.errno not in FULL:
            raise BadInputError(
                f"--cache-dir: cannot write {folder}: {reason_of(error)}: name a folder that can "
                f"be written, with this flag or in {CACHE_ENV}"
            ) from error
        log.error("cache_folder_full folder=%s", folder)


def probe(folder: Path, n_bytes: int) -> None:
    """Write n_bytes to a temporary file in the folder and remove it."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        left = memoryview(bytes(n_bytes))
        while len(left):
            left = left[file.write(left) :]
        # Some file systems report a full disk only here.
        os.fsync(file.fileno())


def reason_of(error: OSError) -> str:
    return error.strerror or str(error)


def provide_home(cache_dir: Path) -> None:
    """Make a folder in `cache_dir` the home of this process's children, if the user's is no use.

    Triton, SGLang and other libraries keep what they compile below the home, each with a variable
    of its own to change that.
    """
    home = Path(os.path.expanduser("~"))
    caches = home / ".cache"
    if _is_writable(home) and (not caches.exists() or _is_writable(caches)):
        return
    own = (cache_dir / "home").resolve()
    own.mkdir(parents=True, exist_ok=True)
    os.environ["HOME"] = str(own)
    log.warning("home_not_writable home=%s used_instead=%s", home, own)


def _is_writable(folder: Path) -> bool:
    return folder.is_absolute() and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
