"""The user's audio that is not part of a turn yet.

In: 16 kHz int16 audio. Out: AudioPart, by absolute position.
Owner: one InputBuffer per session. Positions count all audio of the session, so they stay valid
when old audio is discarded.
"""

import numpy as np

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.errors import BadInputError

# Shorter audio holds no syllable; OpenAI refuses it too, and clients rely on the error.
MIN_COMMIT_MS = 100
_BYTES_PER_SAMPLE = 2


class EmptyCommitError(BadInputError):
    code = "input_audio_buffer_commit_empty"


class BufferFullError(BadInputError):
    code = "input_audio_buffer_full"


class InputBuffer:
    def __init__(self, max_audio_s: float) -> None:
        self._max_samples = int(max_audio_s * INPUT_RATE_HZ)
        self._pcm = bytearray()  # removes bytes at its front in constant time
        self._start = 0

    @property
    def start_sample(self) -> int:
        """Position of the oldest sample still held."""
        return self._start

    @property
    def end_sample(self) -> int:
        """Number of samples ever written."""
        return self._start + self.held_samples

    @property
    def held_samples(self) -> int:
        return len(self._pcm) // _BYTES_PER_SAMPLE

    @property
    def max_samples(self) -> int:
        """The bound of what waits for a commit. Who appends without check_room() keeps to it."""
        return self._max_samples

    def arrived_s(self, audio_ms: float, now_s: float) -> float:
        """When this position arrived. now_s: when the newest sample did."""
        return now_s - (self.end_sample * 1000 / INPUT_RATE_HZ - audio_ms) / 1000

    def check_room(self, n_samples: int) -> None:
        """Raises BufferFullError if n_samples more would exceed the bound."""
        if self.held_samples + n_samples > self._max_samples:
            max_s = self._max_samples / INPUT_RATE_HZ
            raise BufferFullError(
                f"input audio buffer full: at most {max_s:g} s may wait for a commit"
            )

    def append(self, pcm: np.ndarray) -> None:
        self._pcm += pcm.astype("<i2", copy=False).tobytes()

    def take(self, start_sample: int, end_sample: int) -> AudioPart:
        """Remove [start_sample, end_sample) and all audio before it; return what is held of it."""
        first = max(start_sample, self._start) - self._start
        last = min(max(end_sample, self._start), self.end_sample) - self._start
        cut = bytes(self._pcm[first * _BYTES_PER_SAMPLE : last * _BYTES_PER_SAMPLE])
        self.discard_before(self._start + last)
        return AudioPart(np.frombuffer(cut, np.int16))

    def peek(self, start_sample: int, end_sample: int) -> np.ndarray:
        """Return a copy of what is held of [start_sample, end_sample): [n] int16."""
        first = max(start_sample - self._start, 0) * _BYTES_PER_SAMPLE
        last = max(end_sample - self._start, 0) * _BYTES_PER_SAMPLE
        return np.frombuffer(bytes(self._pcm[first:last]), np.int16)

    def check_commit(self, pending_samples: int = 0) -> None:
        """Check that all held audio is long enough for a commit.

        Args:
            pending_samples: audio that was received and is still in the resampler.
        Raises:
            EmptyCommitError: if less than MIN_COMMIT_MS would be committed.
        """
        held_ms = (self.held_samples + pending_samples) * 1000 / INPUT_RATE_HZ
        if held_ms < MIN_COMMIT_MS:
            raise EmptyCommitError(
                "Error committing input audio buffer: buffer too small. Expected at least "
                f"{MIN_COMMIT_MS}ms of audio, but buffer only has {held_ms:.2f}ms of audio."
            )

    def keep(self, sample: int, latest_samples: int) -> int:
        """Discard what is both before `sample` and older than the latest samples, and what exceeds
        the bound. Returns the number of samples that were discarded."""
        oldest = min(sample, self.end_sample - latest_samples)
        start = self._start
        self.discard_before(max(oldest, self.end_sample - self._max_samples))
        return self._start - start

    def discard_before(self, sample: int) -> None:
        n_samples = min(max(sample - self._start, 0), self.held_samples)
        del self._pcm[: n_samples * _BYTES_PER_SAMPLE]
        self._start += n_samples

    def clear(self) -> None:
        self.discard_before(self.end_sample)
