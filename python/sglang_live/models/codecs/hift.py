"""HiFT, which makes sound of mel as it comes.

In: columns of mel. Out: samples at 24 kHz, 480 of each column; of GLM-4-Voice's at 22.05 kHz, 256.
The convolutions of CosyVoice 2's are centred and see zeros behind the last column that is known, so
the end of each chunk is not final: the last 8 columns are computed again with the next ones, from
the source that they had, and faded over. Those of CosyVoice 3's are causal: each chunk computes all
columns again, and goes on where the one before it ended. What is carried is the stream's, never a
module's.
Source: FunAudioLLM/CosyVoice (cli/model.py: token2wav).
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.hift_network import Network, Pads, Pitch, Source
from sglang_live.models.codecs.snac import NOISE_SIZE, Weights, folded, noise_table
from sglang_live.models.host_copy import copy_to

OVERLAP_COLUMNS = 8


@dataclass(frozen=True, slots=True, eq=False)
class HiftState:
    """Of one stream. Dropping it frees everything; nothing else refers to it.

    Attributes:
        n_columns: that have come.
        mel: [n_mels, n], the last ones, which are computed again; None: none have come.
        n_samples: of them, that were returned, if all columns are computed again.
        source, sound: their samples, if they are faded over.
    """

    n_columns: int = 0
    mel: Tensor | None = None
    n_samples: int = 0
    source: Tensor | None = None
    sound: Tensor | None = None


class Hift(ABC):
    """A stateless vocoder of many streams."""

    def vocode(
        self, states: Sequence[HiftState], mels: Sequence[Tensor], ends: Sequence[bool]
    ) -> list[tuple[Tensor, HiftState]]:
        """Make sound of the next columns of several streams.

        Args:
            states: of streams of any ages; not modified.
            mels: [n_mels, n_columns] of each, more than OVERLAP_COLUMNS unless the stream ends.
            ends: whether these are the last ones.
        Returns:
            [n_samples] in [-1, 1] of each, and the state behind them. All samples of a stream are
            as many of each column; those of the last OVERLAP_COLUMNS come at its end.
        """
        joined = [
            mel if state.mel is None else torch.cat((state.mel, mel), 1)
            for state, mel in zip(states, mels, strict=True)
        ]
        # What is padded would be heard by what comes before it: only equal lengths share a batch.
        alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for i, mel in enumerate(joined):
            alike[mel.shape[1], ends[i]].append(i)
        found: dict[int, tuple[Tensor, HiftState]] = {}
        for (_, is_end), rows in alike.items():
            batch = torch.stack([joined[i] for i in rows])
            of_rows = [states[i] for i in rows]
            found |= zip(rows, self._vocode(of_rows, batch, is_end), strict=True)
        return [found[i] for i in range(len(states))]

    @abstractmethod
    def _vocode(
        self, states: list[HiftState], mel: Tensor, is_end: bool
    ) -> list[tuple[Tensor, HiftState]]:
        """mel: [n_streams, n_mels, n_columns], the state's before the next ones."""


class FadingHift(Hift):
    """CosyVoice 2's."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        weights = Weights(tensors, device, dtype)
        self._pitch = Pitch(weights, Pads.BOTH, Pads.BOTH)
        self._network = Network(weights, Pads.BOTH, Pads.BOTH)
        n = self._network.samples_per_column
        self._source = Source(weights, noise_table(device, dtype), _between_columns, n)
        self._n_overlap = OVERLAP_COLUMNS * n
        fade = torch.hamming_window(2 * self._n_overlap, periodic=False, dtype=torch.float64)
        self._fade_in, self._fade_out = fade.to(device, dtype).chunk(2)

    def _vocode(
        self, states: list[HiftState], mel: Tensor, is_end: bool
    ) -> list[tuple[Tensor, HiftState]]:
        n_kept = [0 if state.mel is None else OVERLAP_COLUMNS for state in states]
        begins = [state.n_columns - n for state, n in zip(states, n_kept, strict=True)]
        sources = self._source(self._pitch(mel), begins)
        for source, state in zip(sources, states, strict=True):
            if state.source is not None:
                source[: self._n_overlap] = state.source
        sounds = self._network(mel, sources)
        rows = zip(states, begins, mel, sources, sounds, strict=True)
        return [self._faded(*row, is_end) for row in rows]

    def _faded(
        self, state: HiftState, begin: int, mel: Tensor, source: Tensor, sound: Tensor, is_end: bool
    ) -> tuple[Tensor, HiftState]:
        n, n_columns = self._n_overlap, begin + mel.shape[1]
        if state.sound is not None:
            faded = sound[:n] * self._fade_in + state.sound * self._fade_out
            sound = torch.cat((faded, sound[n:]))
        if is_end:
            return sound, HiftState(n_columns)
        # Copies: views would keep the batch alive.
        kept = mel[:, -OVERLAP_COLUMNS:].clone(), 0, source[-n:].clone(), sound[-n:].clone()
        return sound[:-n], HiftState(n_columns, *kept)


class CausalHift(Hift):
    """CosyVoice 3's, which looks ahead by columns whose sound comes with the next ones."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        weights = Weights(tensors, device, dtype)
        # Angles add up over a stream, so that a small difference in pitch would become a large one.
        exact = Weights(tensors, device, torch.float64)
        self._pitch = Pitch(exact, Pads.RIGHT, Pads.LEFT)
        self._network = Network(weights, Pads.RIGHT, Pads.LEFT)
        n = self._network.samples_per_column
        seeded = torch.Generator().manual_seed(0)
        noise = torch.rand(NOISE_SIZE, generator=seeded).to(device, dtype)
        self._source = Source(weights, noise, _by_columns, n)

    def _vocode(
        self, states: list[HiftState], mel: Tensor, is_end: bool
    ) -> list[tuple[Tensor, HiftState]]:
        network, n_columns = self._network, mel.shape[2]
        n_source = n_columns if is_end else n_columns - self._pitch.n_ahead
        pitch = self._pitch(mel.double())[:, :n_source].to(mel.dtype)
        sources = self._source(pitch, [0] * len(states))
        sounds = network(mel[..., :n_source], sources, 0 if is_end else network.n_ahead)
        if not is_end:  # nor is the last column final: the inverse STFT has nothing behind it
            sounds = sounds[:, : -network.samples_per_column]
        return [
            # A copy: a view would keep the batch alive.
            (sound[state.n_samples :], HiftState(n_columns, columns.clone(), len(sound)))
            for state, sound, columns in zip(states, sounds, mel, strict=True)
        ]


class WholeHift(Hift):
    """Chatterbox's, for streams that come whole: what is left of the prompt's sound in their begin
    is faded out."""

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        """tensors: by the names of hift_layers."""
        weights = Weights(tensors, device, dtype)
        self._pitch = Pitch(weights, Pads.BOTH, Pads.BOTH)
        self._network = Network(weights, Pads.BOTH, Pads.BOTH)
        n = self._network.samples_per_column
        self._source = Source(weights, noise_table(device, dtype), _by_samples, n)
        rise = (torch.linspace(math.pi, 0, n, dtype=torch.float64).cos() + 1) / 2
        self._fade = torch.cat((torch.zeros(n), rise)).to(device, dtype)

    def _vocode(
        self, states: list[HiftState], mel: Tensor, is_end: bool
    ) -> list[tuple[Tensor, HiftState]]:
        sounds = self._network(mel, self._source(self._pitch(mel), [0] * len(states)))
        sounds[:, : len(self._fade)] *= self._fade[: sounds.shape[1]]
        return [(sound, HiftState(mel.shape[2])) for sound in sounds]


class CutHift(Hift):
    """GLM-4-Voice's. Its last column is computed again with the next ones, from the source that it
    had, and is not faded over. Source: GLM-4-Voice (flow_inference.py)."""

    def __init__(
        self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype, rate_hz: int
    ):
        """tensors: by the names of hift_layers."""
        weights = Weights(tensors, device, dtype)
        self._pitch = Pitch(weights, Pads.BOTH, Pads.BOTH)
        self._network = Network(weights, Pads.BOTH, Pads.BOTH)
        self._n = n = self._network.samples_per_column
        self._source = Source(weights, noise_table(device, dtype), _by_samples, n, rate_hz)

    def _vocode(
        self, states: list[HiftState], mel: Tensor, is_end: bool
    ) -> list[tuple[Tensor, HiftState]]:
        begins = [state.n_columns - (state.mel is not None) for state in states]
        sources = self._source(self._pitch(mel), begins)
        for source, state in zip(sources, states, strict=True):
            if state.source is not None:
                source[: self._n] = state.source
        sounds, n = self._network(mel, sources), mel.shape[2]
        if is_end:
            return [(sound, HiftState(at + n)) for at, sound in zip(begins, sounds, strict=True)]
        return [
            # Copies: views would keep the batch alive.
            (
                sound[: -self._n],
                HiftState(at + n, last.clone(), source=source[-self._n :].clone()),
            )
            for at, sound, last, source in zip(begins, sounds, mel[..., -1:], sources, strict=True)
        ]


def hift_of(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Hift:
    """CosyVoice 2's or 3's, as the shapes tell.

    tensors: as in hift.pt; copied.
    Raises:
        BadInputError: the weights lack something.
    """
    layers = hift_layers({name.removeprefix("generator."): tensors[name] for name in tensors})
    first = layers.get("f0_predictor.condnet.0.weight")
    # Only a convolution that looks ahead has an even kernel.
    looks_ahead = first is not None and first.shape[2] % 2 == 0
    return (CausalHift if looks_ahead else FadingHift)(layers, device, dtype)


def hift_layers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights that are stored as norm and direction put together, and activations, which have a
    number per channel, with the column per channel that SNAC's layers have."""
    return {
        name: value.view(1, -1, 1) if name.endswith(".alpha") else value
        for name, value in folded(dict(tensors)).items()
    }


def _between_columns(turns: Tensor, n: int) -> Tensor:
    """The phases that the reference draws for the harmonics have no effect here and in _by_columns,
    and are left out."""
    return F.interpolate(_angles(turns, n), scale_factor=n, mode="linear")


def _by_columns(turns: Tensor, n: int) -> Tensor:
    return _angles(turns, n).repeat_interleave(n, 2)


def _angles(turns: Tensor, n: int) -> Tensor:
    """At the columns."""
    return (turns % 1).cumsum(2) * (2 * math.pi) * n


def _by_samples(turns: Tensor, n: int) -> Tensor:
    """From phases that the reference draws anew for each call."""
    seeded = torch.Generator().manual_seed(0)
    phases = math.pi * (2 * torch.rand(turns.shape[1], generator=seeded) - 1)
    phases[0] = 0
    angles = 2 * math.pi * (turns.repeat_interleave(n, 2).cumsum(2) % 1)
    return angles + copy_to(phases, turns.device, turns.dtype)[:, None]
