"""What an engine holds of one session."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class SessionKv:
    """
    n_tokens: the engine session behind the instructions; 0 after it was lost.
    n_device, n_host: how many of them, from the begin on, have KV there.
    """

    session_id: str
    n_tokens: int = 0
    n_device: int = 0
    n_host: int = 0
