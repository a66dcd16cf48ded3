"""Voices of clients in a folder: one file each, all of them in memory.

A file has what the talker's prompt needs of the speaker, and no recording. Owner: one server.
"""

import fcntl
import hashlib
import hmac
import os
from contextlib import ExitStack
from pathlib import Path
from secrets import token_bytes

import msgspec

from sglang_live.environment import FULL
from sglang_live.errors import BadInputError, LiveError
from sglang_live.gateway.model import CUSTOM_VOICE

_SECRET_BYTES = 32


class NoSuchVoiceError(LiveError):
    code = "voice_not_found"
    http_status = 404

    def __init__(self) -> None:
        super().__init__("This key has no such voice.")


class TooManyVoicesError(LiveError):
    code = "too_many_voices"
    http_status = 429


class VoicesFullError(LiveError):
    code = "storage_full"
    http_status = 507


class Voice(msgspec.Struct, frozen=True, kw_only=True):
    """
    id: begins with CUSTOM_VOICE.
    owner: digest of the key.
    name, consent: as the client gave them.
    created_s: Unix time.
    duration_s: of the recording.
    model: that made it, for which alone it has a meaning.
    speaker: see TurnRequest.
    """

    id: str
    owner: str
    name: str
    consent: str
    created_s: int
    duration_s: float
    model: str
    speaker: bytes


class VoiceStore:
    """A CustomVoices (gateway/model.py)."""

    def __init__(self, folder: Path, model: str, most_of_owner: int):
        """
        Args:
            model: that serves; voices of others are kept, and cannot be used.
        Raises:
            BadInputError: the folder cannot be used, another server uses it, or a file is broken.
        """
        self.model = model
        self._folder, self._most = folder, most_of_owner
        with ExitStack() as opened:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._secret = _secret_of(folder / "secret")
                self._voices = {voice.id: voice for voice in map(_read, folder.glob("*.json"))}
            except BlockingIOError as error:
                raise BadInputError(f"--custom-voices: another server uses {folder}") from error
            except OSError as error:
                raise BadInputError(f"--custom-voices: cannot use {folder}: {error}") from error
            self.close = opened.pop_all().close

    # --- what responses are spoken by ---

    def names(self, owner: str) -> tuple[tuple[str, str], ...]:
        return tuple((v.id, v.name) for v in self._of(owner) if v.model == self.model)

    def speaker(self, owner: str, voice: str) -> bytes:
        found = self._voices.get(voice)
        if found is None or (found.owner, found.model) != (self.digest(owner), self.model):
            return b""
        return found.speaker

    # --- what clients do ---

    def digest(self, owner: str) -> str:
        """What a file has in place of a key: nothing from which the key follows."""
        return hmac.new(self._secret, owner.encode(), hashlib.sha256).hexdigest()

    def check_room(self, owner: str) -> None:
        """Raises TooManyVoicesError if the owner can have no more."""
        if len(self._of(owner)) >= self._most:
            raise TooManyVoicesError(f"This key has {self._most} voices, its limit: delete one.")

    def get(self, owner: str, voice_id: str) -> Voice:
        """Raises NoSuchVoiceError, also for a voice of another owner."""
        found = self._voices.get(voice_id)
        if found is None or found.owner != self.digest(owner):
            raise NoSuchVoiceError
        return found

    def add(self, voice: Voice) -> None:
        """On return it is on the disk. Raises VoicesFullError."""
        path = self._path(voice)
        temporary = path.with_suffix(".new")
        try:
            with open(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
                file.write(msgspec.json.encode(voice))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if error.errno not in FULL:
                raise
            raise VoicesFullError("The server has no room for another voice.") from error
        self._voices[voice.id] = voice

    def delete(self, voice: Voice) -> None:
        self._path(voice).unlink(missing_ok=True)
        self._voices.pop(voice.id, None)

    def _of(self, owner: str) -> list[Voice]:
        digest = self.digest(owner)
        voices = [voice for voice in self._voices.values() if voice.owner == digest]
        return sorted(voices, key=lambda voice: (voice.created_s, voice.id))

    def _path(self, voice: Voice) -> Path:
        assert voice.id.startswith(CUSTOM_VOICE)
        return self._folder / f"{voice.id}.json"


def _read(path: Path) -> Voice:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Voice)
    except msgspec.MsgspecError as error:
        raise BadInputError(f"--custom-voices: {path} is no voice: {error}") from error


def _secret_of(path: Path) -> bytes:
    if not path.exists():
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(token_bytes(_SECRET_BYTES))
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise BadInputError(f"--custom-voices: {path} is no secret of {_SECRET_BYTES} bytes")
    return secret
