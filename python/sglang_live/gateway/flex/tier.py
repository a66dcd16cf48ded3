"""The service tier of an HTTP request: whether it is flex, and how its response says so.

In: the body's `service_tier`, the header X-Service-Tier, the key. Out: Tier. Each of the three can
make a request flex; none of them takes it back, so that a key for batches alone stays one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from starlette.datastructures import Headers

from sglang_live.errors import LiveError
from sglang_live.gateway.auth import ANONYMOUS, Keys
from sglang_live.gateway.errors import ClientEventError, cut
from sglang_live.gateway.json_forms import ServiceTier

HEADER = "x-service-tier"
FLEX, DEFAULT = "flex", "default"
TIERS: tuple[str, ...] = get_args(ServiceTier)


class BatchOnlyKeyError(LiveError):
    """A key for flex requests and batches asks for something that a user waits for."""

    code = "batch_only_key"
    http_status = 403

    def __init__(self) -> None:
        super().__init__("This key is for flex requests and batches alone.")


@dataclass(frozen=True, slots=True)
class Tier:
    """
    flex: whether what is heard goes before this request.
    named: whether the request names a tier, so that its response does, as that of OpenAI.
    """

    flex: bool = False
    named: bool = False

    @property
    def served(self) -> str:
        return FLEX if self.flex else DEFAULT

    def fields(self) -> dict[str, str]:
        """For the body of a response."""
        return {"service_tier": self.served} if self.named else {}

    def headers(self) -> dict[str, str]:
        return {HEADER: self.served} if self.named else {}


ORDINARY = Tier()


class Tiers:
    """batch_only: keys whose requests are all flex."""

    def __init__(self, batch_only: Iterable[str] = ()):
        self._names = tuple(batch_only)
        self._batch_only = Keys(self._names)

    def of(self, headers: Headers, in_body: str | None = None) -> Tier:
        """
        Args:
            in_body: `service_tier` of the body, which its form has checked.
        Raises:
            ClientEventError: the header is no tier.
        """
        in_header = headers.get(HEADER)
        if in_header is not None and in_header not in TIERS:
            raise ClientEventError(
                f"{cut(in_header)!r} is no service tier: {', '.join(TIERS)}.",
                param="X-Service-Tier",
            )
        is_batch_only = bool(self._names) and self._batch_only.owner(headers) != ANONYMOUS
        return Tier(
            flex=is_batch_only or FLEX in (in_body, in_header),
            named=is_batch_only or in_body is not None or in_header is not None,
        )

    def check_heard(self, owner: str) -> None:
        """Raises BatchOnlyKeyError if this key may not open what a user listens to."""
        if owner in self._names:
            raise BatchOnlyKeyError
