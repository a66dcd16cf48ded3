"""Checks before anything is loaded: folders can be written, disks have room, recordings speech.

Without them, a stage would fail minutes later inside a library, and its error would rarely name the
folder.
"""

import logging
import os
import ssl
import tempfile
from pathlib import Path

import numpy as np

from sglang_live.core import INPUT_RATE_HZ
from sglang_live.environment import FULL, PROBE_BYTES, probe, reason_of
from sglang_live.errors import BadInputError, LiveError
from sglang_live.interaction.presence import has_speech
from sglang_live.interaction.silero import SileroModel
from sglang_live.models.family import ModelFacts
from sglang_live.models.voice_files import read_recording, voice_files

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
# SGLang maps a file of 16 KiB per engine there. The kernel kills it if the pages do not fit.
_SHM_BYTES = 1 << 20


def check_log_folder(flag: str, folder: Path) -> None:
    """Make the folder if it is absent, and check that it can be written.

    A full disk is only logged, because a server without room for logs drops lines and serves.

    Raises:
        BadInputError: the path is no folder, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe(folder, PROBE_BYTES)
    except OSError as error:
        if error.errno not in FULL:
            raise BadInputError(f"{flag}: cannot write {folder}: {reason_of(error)}") from error
        log.error("log_folder_full flag=%s folder=%s", flag, folder)


def check_storage(folder: Path, n_bytes: int) -> None:
    """Raises BadInputError if the folder of session storage cannot be written."""
    try:
        probe(folder, PROBE_BYTES)
    except OSError as error:
        raise BadInputError(
            f"--session-storage: cannot write {folder}: {reason_of(error)}"
        ) from error
    space = os.statvfs(folder)
    n_free = space.f_bavail * space.f_frsize
    if n_free < n_bytes:
        log.warning("session_storage_short folder=%s free=%d wanted=%d", folder, n_free, n_bytes)


def check_certificate(certificate: Path, key: Path | None) -> None:
    """Raises BadInputError for files that TLS cannot use."""

    def refuse() -> str:
        raise BadInputError(f"--ssl-keyfile: {key or certificate} is encrypted: store it decrypted")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, refuse)
    except OSError as error:
        reason = reason_of(error)
        if isinstance(error, ssl.SSLError):
            reason = error.reason or "no PEM"
        raise BadInputError(
            f"--ssl-certfile: {certificate}, with the key in {key or certificate}: needed are PEM "
            f"files, and the key of that certificate ({reason})"
        ) from error


def check_recordings(facts: ModelFacts) -> None:
    """Raises BadInputError for a recording of which the model can make no voice."""
    if facts.recordings is None:
        return
    model = SileroModel()
    for file in voice_files(facts.recordings).values():
        samples = read_recording(file, INPUT_RATE_HZ)
        found_s = len(samples) / INPUT_RATE_HZ
        if not facts.least_recorded_s <= found_s <= facts.most_recorded_s:
            raise BadInputError(
                f"--voices: {file} lasts {found_s:.2f} s, this model takes "
                f"{facts.least_recorded_s:g} to {facts.most_recorded_s:g} s"
            )
        if not has_speech(np.round(32767 * samples).astype(np.int16), model):
            raise BadInputError(f"--voices: {file}: there is no speech in it")


def check_temporary_folder() -> None:
    """Check the folder for temporary files.

    Raises:
        LiveError: no such folder can be written, or the folder that TMPDIR names cannot (Python
            would use another one without a warning).
    """
    named = os.environ.get("TMPDIR")
    try:
        folder = Path(named) if named else Path(tempfile.gettempdir())
        probe(folder, PROBE_BYTES)
    except OSError as error:
        where = f"TMPDIR: cannot write {named}" if named else "no folder for temporary files"
        raise LiveError(
            f"{where}: {reason_of(error)}: set TMPDIR to a folder that can be written"
        ) from error


def check_shared_memory() -> None:
    """Raises LiveError if /dev/shm exists but is full. Without it, sockets carry all data."""
    if not SHM_DIR.is_dir():
        return
    try:
        probe(SHM_DIR, _SHM_BYTES)
    except OSError as error:
        hint = "; a container gets more by --shm-size=1g" if error.errno in FULL else ""
        raise LiveError(f"cannot write {SHM_DIR}: {reason_of(error)}{hint}") from error
