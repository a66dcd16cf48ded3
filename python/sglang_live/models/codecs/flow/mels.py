"""Codes of a voice to mel: an encoder, and a flow from noise that the codes and the voice guide.

In: all codes of streams so far. Out: all their columns of mel. Nothing is carried from call to
call, as in the reference: keys and values of all layers and steps are 115 MB of a second of speech
in half precision, while to compute a piece of 5 s anew for chunks of 1, 2 and 4 s costs about twice
the work.
Source: FunAudioLLM/CosyVoice (flow/flow.py: CausalMaskedDiffWithXvec, flow/flow_matching.py),
arXiv:2412.10117; classifier-free guidance: arXiv:2207.12598.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sglang_live.models.codecs.flow.dit import DiT
from sglang_live.models.codecs.flow.encoder import UPSAMPLING, Encoder, Lookahead
from sglang_live.models.codecs.flow.estimator import Estimator
from sglang_live.models.codecs.flow.layers import Linear, visible
from sglang_live.models.codecs.snac import Weights

N_STEPS, N_MEAN_STEPS = 10, 2
GUIDANCE = 0.7
# Of the noise, which begins anew behind them: 300 s.
NOISE_COLUMNS = 15_000


@dataclass(frozen=True, slots=True, eq=False)
class FlowVoice:
    """What the flow knows of a voice; shared by all its streams.

    codes: [n] int64, what is said in a recording of it; on the CPU.
    mel: [UPSAMPLING * n, n_mels], of the same recording; it may have a column more.
    speaker: [n_mels], projected.
    """

    codes: Tensor
    mel: Tensor
    speaker: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FlowInput:
    """One stream's part of a batch.

    codes: [n] int64 of the stream so far, on the CPU.
    n_ahead: the last ones, which have no columns yet.
    chunk: codes to which attention is cut; 0: it sees the whole stream.
    """

    voice: FlowVoice
    codes: Tensor
    n_ahead: int
    chunk: int

    @property
    def n_codes(self) -> int:
        return len(self.voice.codes) + len(self.codes)


class TokenFlow:
    """
    Attributes:
        device: of its tensors.
        n_codes: of the codebook.
        ahead: see Lookahead.
        is_mean: whether it flows by means of whole steps: few, without guidance.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        """tensors: as in flow.pt; copied."""
        weights = Weights(tensors, device, dtype)
        self.device = device
        self._table = weights.take("input_embedding.weight")
        self._speaker = Linear(weights, "spk_embed_affine_layer")
        self._encoder: Encoder | Lookahead
        self._estimator: Estimator | DiT
        estimator = "decoder.estimator"
        if weights.has("pre_lookahead_layer.conv1.weight"):  # CosyVoice 3
            self._encoder = Lookahead(weights, "pre_lookahead_layer")
            self._estimator = DiT(weights, estimator)
        else:
            self._encoder = Encoder(weights, "encoder")
            self._estimator = Estimator(weights, estimator)
        mixer = f"{estimator}.time_embed_mixer"
        self.is_mean = weights.has(f"{mixer}.weight")
        self._mixer = Linear(weights, mixer) if self.is_mean else None
        self.n_codes, self.ahead = len(self._table), self._encoder.ahead
        self._noise = seeded_noise(self._speaker.weight.shape[0]).to(device, dtype)

    def voice(self, codes: Tensor, mel: Tensor, embedding: Tensor) -> FlowVoice:
        """
        Args:
            codes: [n] int64.
            mel: [UPSAMPLING * n, n_mels].
            embedding: [width] of the speaker.
        """
        weight = self._speaker.weight
        speaker = self._speaker(F.normalize(embedding.to(weight), dim=0))
        return FlowVoice(codes.cpu(), mel.to(weight), speaker)

    def mels(self, inputs: Sequence[FlowInput]) -> list[Tensor]:
        """[n_mels, n_columns] of each stream: of all its codes that have columns, without those of
        its voice."""
        codes = [torch.cat((each.voice.codes, each.codes)) for each in inputs]
        ids = pad_sequence(codes, batch_first=True).to(self.device)
        n_codes = [each.n_codes for each in inputs]
        lengths = [each.n_codes - each.n_ahead for each in inputs]
        chunks = [each.chunk or each.n_codes for each in inputs]
        n_ids, lasts, cuts = (
            torch.tensor(sizes, device=self.device) for sizes in (n_codes, lengths, chunks)
        )
        said = self._encoder(F.embedding(ids, self._table), n_ids, lasts, cuts, max(lengths))
        prompts = torch.zeros_like(said)
        for row, each in zip(prompts, inputs, strict=True):
            row[: len(each.voice.mel)] = each.voice.mel
        speakers = torch.stack([each.voice.speaker for each in inputs])
        speakers = speakers[:, None].expand_as(said)
        seen = visible(UPSAMPLING * lasts, UPSAMPLING * cuts, said.shape[1])
        given = torch.cat((said, speakers, prompts), 2)
        at = torch.arange(given.shape[1], device=self.device) % NOISE_COLUMNS
        noise = self._noise[at].expand(len(given), -1, -1)
        flow = self._guided_flow if self._mixer is None else self._mean_flow
        mel = flow(noise, given, seen).transpose(1, 2)
        return [
            columns[:, len(each.voice.mel) : UPSAMPLING * length]
            for columns, each, length in zip(mel, inputs, lengths, strict=True)
        ]

    def _guided_flow(self, x: Tensor, given: Tensor, seen: Tensor) -> Tensor:
        """[n_streams, n_columns, n_mels], by Euler's method in steps that become longer."""
        ends = step_ends(x)
        times = self._estimator.time(ends[:-1])
        # Each stream is once guided and once not.
        both, seen = torch.cat((given, torch.zeros_like(given))), seen.repeat(2, 1, 1, 1)
        for time, length in zip(times, ends.diff(), strict=True):
            moved = self._estimator(torch.cat((x.repeat(2, 1, 1), both), 2), time[None], seen)
            guided, free = moved.chunk(2)
            x = x + length * ((1 + GUIDANCE) * guided - GUIDANCE * free)
        return x

    def _mean_flow(self, x: Tensor, given: Tensor, seen: Tensor) -> Tensor:
        """As _guided_flow; each step knows its begin and its end. Source: arXiv:2510.07979."""
        assert self._mixer is not None
        ends = torch.linspace(0, 1, N_MEAN_STEPS + 1, device=x.device, dtype=x.dtype)
        times = self._estimator.time(ends)
        for begin, end in pairwise(times):
            time = self._mixer(torch.cat((begin, end)))[None]
            x = x + self._estimator(torch.cat((x, given), 2), time, seen) / N_MEAN_STEPS
        return x


def seeded_noise(n_mels: int) -> Tensor:
    """[NOISE_COLUMNS, n_mels]."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(n_mels, NOISE_COLUMNS, generator=seeded).T.contiguous()


def step_ends(like: Tensor) -> Tensor:
    """[N_STEPS + 1], times from 0 to 1, in steps that become longer."""
    ends = torch.linspace(0, 1, N_STEPS + 1, device=like.device, dtype=like.dtype)
    return 1 - torch.cos(ends * 0.5 * math.pi)
