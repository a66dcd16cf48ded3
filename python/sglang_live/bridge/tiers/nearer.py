"""A tier between the device and the host, which an extension may add to a SessionTier."""

from sglang_live.bridge.tiers.session_copies import SessionCopies


class NearerTier:
    """One that has no memory.

    Attributes:
        copies: on it, which are written and loaded before those on the host; empty: there are none.
        is_draining: whether its copies have to leave, so that the next round must come soon.
    """

    copies: tuple[SessionCopies, ...] = ()

    @property
    def is_draining(self) -> bool:
        return False

    def reset(self) -> None:
        """To be called when SGLang has emptied its pools."""

    def step(self) -> None:
        """To be called once a round."""

    def used(self, session_id: str) -> None:
        """To be called when a turn of the session has been copied, to any tier."""

    def changed(self, session_id: str) -> None:
        """To be called when the session's copies or its expected next use have changed."""

    def report(self) -> dict[str, float]:
        return {}
