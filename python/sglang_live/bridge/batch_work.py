"""What a batch of an engine computes, from its launch to its result."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What one batch computes.

    Attributes:
        number: of the engine's launches, from 1.
        n_streams: requests of a decode round; 0: the batch is a prefill.
        n_tokens: tokens of a prefill.
        audio_s: seconds of audio that the prefill's encoder computes.
        n_pairs: pairs of a new token and a token that it attends to.
        n_context: KV tokens of a decode round's requests; of a prefill, pairs of a new token and a
            token before the batch.
        n_squared: sum of the squares of a prefill's new tokens, by request.
        n_loaded: tokens of KV that a prefill loads from the host.
    """

    number: int
    n_streams: int = 0
    n_tokens: int = 0
    audio_s: float = 0.0
    n_pairs: int = 0
    n_context: int = 0
    n_squared: int = 0
    n_loaded: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch that was launched. at_s: just before the launch."""

    work: BatchWork
    at_s: float
