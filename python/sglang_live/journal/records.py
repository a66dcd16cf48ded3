"""What leaves the process: sealed records, digests of tokens. All keys derive from the fleet's.

A session has a key of its own, so that random nonces of all its records may be few bytes: AES-GCM
with one key for a fleet would meet a nonce twice within days (NIST SP 800-38D, 8.3).
"""

import hmac
import os
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sglang_live.errors import LiveError
from sglang_live.stages.transport.stage_key import read_secret

_NONCE_BYTES = 12


class UnreadableRecordError(LiveError):
    """A record was not written with this fleet's key, for this session under this name."""


class FleetKey:
    """The secret that all gateways of a fleet have."""

    def __init__(self, secret: bytes):
        self._secret = secret

    @staticmethod
    def load(path: Path) -> "FleetKey":
        """Raises BadInputError: the file cannot be read, is too short, or others may read it."""
        return FleetKey(read_secret(path, "journal key"))

    def derived(self, purpose: str) -> bytes:
        """32 bytes, from which those of other purposes do not follow."""
        return hmac.digest(self._secret, b"sglang_live journal " + purpose.encode(), sha256)

    def digest(self, purpose: str, text: str) -> str:
        """64 hexadecimal digits, from which a text does not follow, however short."""
        return hmac.digest(self.derived(purpose), text.encode(), sha256).hex()

    def of_session(self, session_id: str) -> "SessionKey":
        return SessionKey(self.derived(f"session {session_id}"))


class SessionKey:
    """Seals the records of one session. Safe in any thread."""

    def __init__(self, key: bytes):
        self._cipher = AESGCM(key)

    def seal(self, name: str, data: bytes) -> bytes:
        """name: of the record, under which alone it can be opened."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """Raises UnreadableRecordError."""
        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._cipher.decrypt(nonce, data, name.encode())
        except (InvalidTag, ValueError) as error:
            raise UnreadableRecordError(f"record {name} cannot be read") from error
