"""Codes to mel as they come, with state that belongs to a stream: Step-Audio 2's flow.

In: the next codes of streams. Out: their columns of mel, and the state behind them. The state is
bounded but for the encoder's keys, which are small: 33 MB a second of speech in half precision for
the prompt and the last columns, as many, and 0.7 MB for the encoder.
Source: stepfun-ai/Step-Audio2 (cosyvoice2/flow/flow.py: inference_chunk, token2wav.py: stream).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sglang_live.errors import BadInputError
from sglang_live.models.codecs.flow import AHEAD
from sglang_live.models.codecs.flow.cached_dit import CachedDiT, Step
from sglang_live.models.codecs.flow.cached_encoder import CachedEncoder, EncoderState
from sglang_live.models.codecs.flow.encoder import UPSAMPLING
from sglang_live.models.codecs.flow.layers import Linear
from sglang_live.models.codecs.flow.mels import (
    GUIDANCE,
    NOISE_COLUMNS,
    seeded_noise,
    state_dtype,
    step_ends,
)
from sglang_live.models.codecs.snac import Weights
from sglang_live.models.host_copy import copy_to


@dataclass(frozen=True, slots=True, eq=False)
class FlowState:
    """Of one stream; what is behind a voice's prompt is shared by all its streams.

    n_columns: so far, with those of the prompt.
    steps: of the estimator.
    """

    n_columns: int
    encoder: EncoderState
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CachedVoice:
    """
    n_columns: of its recording.
    speaker: [n_mels], projected.
    state: behind the recording.
    """

    n_columns: int
    speaker: Tensor
    state: FlowState


@dataclass(frozen=True, slots=True, eq=False)
class FlowChunk:
    """One stream's part of a batch.

    codes: [n] int64 on the CPU, at least one.
    n_ahead: the last ones, which have no columns yet; 0: the stream ends.
    """

    voice: CachedVoice
    state: FlowState
    codes: Tensor
    n_ahead: int

    @property
    def n_columns(self) -> int:
        return UPSAMPLING * (len(self.codes) - self.n_ahead)


class CachedFlow:
    """
    Attributes:
        device: of its tensors.
        n_codes: of the codebook.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        """Args: see TokenFlow."""
        weights = Weights(tensors, device, dtype)
        self.device = device
        self._table = weights.take("input_embedding.weight")
        self._speaker = Linear(weights, "spk_embed_affine_layer")
        self._encoder = CachedEncoder(weights, "encoder")
        self._estimator = CachedDiT(weights, "decoder.estimator")
        self.n_codes = len(self._table)
        self._noise = seeded_noise(self._speaker.weight.shape[0]).to(device, state_dtype(dtype))
        self._ends = step_ends(self._noise)
        self._times = self._estimator.time(self._ends[:-1])

    @torch.inference_mode()
    def voice(self, codes: Tensor, mel: Tensor, embedding: Tensor) -> CachedVoice:
        """
        Args:
            codes: [n] int64.
            mel: [UPSAMPLING * n, n_mels].
            embedding: [width] of the speaker.
        Raises:
            BadInputError: there are fewer codes than the flow looks ahead.
        """
        if len(codes) < AHEAD:
            raise BadInputError(f"a recording of {len(codes)} codes is too short for a voice")
        weight = self._speaker.weight
        speaker = self._speaker(F.normalize(embedding.to(weight), dim=0))
        steps = (self._estimator.nothing(),) * len(self._times)
        begin = CachedVoice(len(mel), speaker, FlowState(0, self._encoder.nothing(), steps))
        # Its own first codes stand behind the last one, as in the reference.
        said = torch.cat((codes, codes[:AHEAD])).cpu()
        chunk = FlowChunk(begin, begin.state, said, AHEAD)
        [(_, state)] = self._flow([chunk], mel.to(weight))
        return replace(begin, state=state)

    @torch.inference_mode()
    def mels(self, chunks: Sequence[FlowChunk]) -> list[tuple[Tensor, FlowState]]:
        """[n_mels, n_columns] of each stream, and the state behind them."""
        return self._flow(chunks, None)

    def _flow(
        self, chunks: Sequence[FlowChunk], prompt: Tensor | None
    ) -> list[tuple[Tensor, FlowState]]:
        """prompt: [n_columns, n_mels] of a voice's recording, which is kept as a whole."""
        columns = [chunk.n_columns for chunk in chunks]
        ids = pad_sequence([chunk.codes for chunk in chunks], batch_first=True)
        n_positions = max(columns) // UPSAMPLING + AHEAD
        ids = copy_to(F.pad(ids, (0, n_positions - ids.shape[1])), self.device)
        said, encoders = self._encoder.chunk(
            F.embedding(ids, self._table),
            [len(chunk.codes) for chunk in chunks],
            [n // UPSAMPLING for n in columns],
            [chunk.state.encoder for chunk in chunks],
        )
        given = torch.cat((said, self._speakers(chunks, said), _prompts(prompt, said)), 2)
        both = torch.cat((given, torch.zeros_like(given)))
        most = [None if prompt is not None else chunk.voice.n_columns for chunk in chunks]
        x, steps = self._noise_behind(chunks, said.shape[1]), []
        for i, (time, length) in enumerate(zip(self._times, self._ends.diff(), strict=True)):
            states = [chunk.state.steps[i] for chunk in chunks]
            at_once = torch.cat((x.to(both.dtype).repeat(2, 1, 1), both), 2)
            moved, behind = self._estimator(at_once, time[None], columns, most, states)
            guided, free = moved.to(x.dtype).chunk(2)
            x = x + length * ((1 + GUIDANCE) * guided - GUIDANCE * free)
            steps.append(behind)
        return [
            # A copy: a view would keep the batch alive.
            (mel[:n].T.clone(), FlowState(chunk.state.n_columns + n, encoder, of_stream))
            for mel, n, chunk, encoder, of_stream in zip(
                x, columns, chunks, encoders, zip(*steps, strict=True), strict=True
            )
        ]

    def _speakers(self, chunks: Sequence[FlowChunk], said: Tensor) -> Tensor:
        speakers = torch.stack([chunk.voice.speaker for chunk in chunks])
        return speakers[:, None].expand_as(said)

    def _noise_behind(self, chunks: Sequence[FlowChunk], n: int) -> Tensor:
        """[n_streams, n, n_mels]. It goes on where the chunk before ended; in the reference it
        stays where the kept columns end."""
        begins = torch.tensor([chunk.state.n_columns for chunk in chunks])
        at = copy_to(begins, self.device)[:, None] + torch.arange(n, device=self.device)
        return self._noise[at % NOISE_COLUMNS]


def _prompts(prompt: Tensor | None, said: Tensor) -> Tensor:
    return torch.zeros_like(said) if prompt is None else prompt.expand_as(said)
