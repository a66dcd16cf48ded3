"""Costs of the stages of one model on one device, and of copies between host and device.

Every figure is positive. Its name ends with its unit; the methods return seconds.
"""

import math
from dataclasses import dataclass, fields
from typing import Protocol


class EngineCosts(Protocol):
    """Costs of an engine's batches."""

    @property
    def kv_token_bytes(self) -> float:
        """Size of one token's KV."""
        ...

    @property
    def n_layers(self) -> float:
        """Of which each computes as soon as its own KV is loaded."""
        ...

    def decode_s(self, n_streams: int, kv_tokens: int) -> float:
        """Duration of a decode round. kv_tokens: of all its streams."""
        ...

    def prefill_s(self, n_tokens: int, audio_s: float) -> float:
        """Duration of a prefill. audio_s: seconds of audio that it encodes."""
        ...


class _Positive:
    __slots__ = ()

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):  # type: ignore[arg-type] # a mixin
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerCosts(_Positive):
    decode_fixed_ms: float
    decode_per_stream_ms: float
    decode_per_kv_token_ns: float
    prefill_fixed_ms: float
    prefill_per_token_us: float
    encoder_per_audio_s_ms: float
    kv_token_bytes: float
    n_layers: float

    def decode_s(self, n_streams: int, kv_tokens: int) -> float:
        streams_ms = self.decode_fixed_ms + n_streams * self.decode_per_stream_ms
        return streams_ms / 1e3 + kv_tokens * self.decode_per_kv_token_ns / 1e9

    def prefill_s(self, n_tokens: int, audio_s: float) -> float:
        ms = self.prefill_fixed_ms + audio_s * self.encoder_per_audio_s_ms
        return ms / 1e3 + n_tokens * self.prefill_per_token_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerCosts(_Positive):
    """The code predictor completes one frame of each stream in every decode round."""

    decode_fixed_ms: float
    decode_per_stream_ms: float
    decode_per_kv_token_ns: float
    code_predictor_fixed_ms: float
    code_predictor_per_stream_ms: float
    prefill_fixed_ms: float
    prefill_per_token_us: float
    kv_token_bytes: float
    n_layers: float

    def decode_s(self, n_streams: int, kv_tokens: int) -> float:
        fixed_ms = self.decode_fixed_ms + self.code_predictor_fixed_ms
        per_stream_ms = self.decode_per_stream_ms + self.code_predictor_per_stream_ms
        streams_ms = fixed_ms + n_streams * per_stream_ms
        return streams_ms / 1e3 + kv_tokens * self.decode_per_kv_token_ns / 1e9

    def prefill_s(self, n_tokens: int, audio_s: float) -> float:
        """audio_s has no cost: the talker gets the thinker's states."""
        return self.prefill_fixed_ms / 1e3 + n_tokens * self.prefill_per_token_us / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class VocoderCosts(_Positive):
    fixed_ms: float
    per_chunk_ms: float

    def decode_s(self, n_chunks: int) -> float:
        return (self.fixed_ms + n_chunks * self.per_chunk_ms) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerCosts(_Positive):
    """What a batch of a vocoder costs more that runs kernel by kernel, and computes all codes that
    it sees, of which each sees the others.

    launch_ms: for which the vocoder's thread launches it.
    """

    launch_ms: float
    fixed_ms: float
    per_code_us: float
    per_pair_ns: float

    def decode_s(self, n_streams: int, n_codes: int) -> float:
        """n_codes: of the longest stream; others are padded."""
        per_stream_s = n_codes * (self.per_code_us / 1e6 + n_codes * self.per_pair_ns / 1e9)
        return self.fixed_ms / 1e3 + n_streams * per_stream_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts(_Positive):
    """Copies between host and device, and to and from the memory that another stage lends; the two
    directions do not share their bandwidth.
    """

    to_device_gb_per_s: float
    to_device_latency_us: float
    to_host_gb_per_s: float
    to_host_latency_us: float
    peer_gb_per_s: float
    peer_latency_us: float

    def to_device_s(self, n_bytes: float) -> float:
        return self.to_device_latency_us / 1e6 + n_bytes / (self.to_device_gb_per_s * 1e9)

    def to_host_s(self, n_bytes: float) -> float:
        return self.to_host_latency_us / 1e6 + n_bytes / (self.to_host_gb_per_s * 1e9)

    def peer_s(self, n_bytes: float) -> float:
        return self.peer_latency_us / 1e6 + n_bytes / (self.peer_gb_per_s * 1e9)
