"""The secret that a server shares with its stages on other hosts: CURVE, from one key file.

The stage's key pair is derived from the file. A connection to it needs its public key (ZMTP 3.1
CURVE, RFC 26), which is derived from the file too: so the file identifies both ends, and the
connection is encrypted.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from sglang_live.errors import BadInputError

MIN_BYTES = 32
_ADDRESS = re.compile(r"tcp://(\[(?P<six>[\w.:%]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})")


def read_secret(path: str | Path, what: str) -> bytes:
    """
    Args:
        what: name for messages.
    Returns:
        The file's content, without white space around it.
    Raises:
        BadInputError: the file cannot be read, is too short, or is readable by other users.
    """
    try:
        secret = Path(path).read_bytes().strip()
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise BadInputError(f"cannot read the {what}: {error}") from error
    if len(secret) < MIN_BYTES:
        raise BadInputError(f"the {what} {path} has under {MIN_BYTES} bytes")
    if mode & 0o077:
        raise BadInputError(f"other users may read the {what} {path}: chmod 600 it")
    return secret


def read_key(path: str | Path) -> bytes:
    """
    Returns:
        The stage's secret key, Z85.
    Raises:
        BadInputError: the file cannot be read, is too short, or is readable by other users.
    """
    secret = read_secret(path, "stage key")
    return z85.encode(hashlib.sha256(b"sglang_live stage key" + secret).digest())


def guard(socket: zmq.Socket[Any], path: str) -> None:
    """Require the key of a stage's socket that has not been bound yet."""
    secret = read_key(path)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))


def unlock(socket: zmq.Socket[Any], path: str) -> None:
    """Use the key for a server's socket that has not been connected yet."""
    public, secret = zmq.curve_keypair()
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(read_key(path)))


def host_and_port(flag: str, address: str) -> tuple[str, int]:
    """Of a stage's address; IPv6 without its brackets. Raises BadInputError for another form."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 65_536:
        raise BadInputError(
            f"{flag} takes tcp://HOST:PORT, with an IPv6 address in brackets, got {address!r}"
        )
    return found["six"] or found["host"], int(found["port"])


def check_exposed(addresses: tuple[str, ...], key_file: str, allowed: bool) -> None:
    """
    Args:
        addresses: tcp:// addresses of stages.
        allowed: --allow-keyless-stages.
    Raises:
        BadInputError: other machines can reach one of them, and there is no key.
    """
    if key_file:
        read_key(key_file)
        return
    for address in addresses:
        host = address.removeprefix("tcp://").rpartition(":")[0]
        if host not in ("127.0.0.1", "localhost", "[::1]") and not allowed:
            raise BadInputError(
                f"{address} without a key: give --stage-key-file to both ends, or "
                "--allow-keyless-stages on a network where every machine is yours"
            )
