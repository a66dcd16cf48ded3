"""Secrets for browsers and phones: for a while they open realtime calls, and nothing else.

In: a key's owner asks, with the settings of the calls to come. Out: a secret that expires.
Owner: one ClientSecrets per process; a restart forgets them, as their expiry would.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from secrets import token_urlsafe
from typing import Annotated, Literal

from msgspec import Meta

from sglang_live.errors import CapacityError
from sglang_live.gateway.json_forms import Strict
from sglang_live.gateway.realtime.events import SessionForm

_PREFIX = "ek_"
_RANDOM_BYTES = 24
# Each holds its settings: a loop that asks for secrets must not fill the memory, nor take all
# that others may have.
_MOST, _MOST_OF_ONE = 10_000, 1_000


class ExpiryForm(Strict):
    """From OpenAI's API: seconds from when the secret was made."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = 600


class ClientSecretForm(Strict):
    expires_after: ExpiryForm | None = None
    session: SessionForm | None = None


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """
    expires_at_s: Unix time. owner: the key it was made with. session: of calls it opens.
    """

    value: str
    expires_at_s: float
    owner: str
    session: SessionForm | None


class ClientSecrets:
    def __init__(self, now_s: Callable[[], float] = time.time):
        self._now_s = now_s
        self._secrets: dict[str, ClientSecret] = {}  # in the order in which they were made

    def make(self, form: ClientSecretForm, owner: str) -> ClientSecret:
        """Raises CapacityError: too many have not expired yet."""
        now_s = self._now_s()
        self._secrets = {v: s for v, s in self._secrets.items() if s.expires_at_s > now_s}
        if len(self._secrets) >= _MOST:
            raise CapacityError(f"full: {_MOST} client secrets", retry_after_s=60)
        if sum(secret.owner == owner for secret in self._secrets.values()) >= _MOST_OF_ONE:
            raise CapacityError(f"{_MOST_OF_ONE} client secrets of one key", retry_after_s=60)
        seconds = (form.expires_after or ExpiryForm()).seconds
        value = _PREFIX + token_urlsafe(_RANDOM_BYTES)
        secret = ClientSecret(value, now_s + seconds, owner, form.session)
        self._secrets[value] = secret
        return secret

    def find(self, offered: Iterable[str]) -> ClientSecret | None:
        """The first of these that is one and has not expired."""
        for value in offered:
            # A dictionary's answer takes no longer for a guess that is nearly right.
            secret = self._secrets.get(value)
            if secret is not None and secret.expires_at_s > self._now_s():
                return secret
        return None
