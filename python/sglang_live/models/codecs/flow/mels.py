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

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.dit import DiT
from sglang_live.models.codecs.flow.encoder import UPSAMPLING, Encoder, Lookahead
from sglang_live.models.codecs.flow.estimator import Estimator
from sglang_live.models.codecs.flow.graphs import FlowGraphs, Make
from sglang_live.models.codecs.flow.layers import Linear, added, visible
from sglang_live.models.codecs.snac import Weights
from sglang_live.models.cuda_graphs import Capture, CudaCapture
from sglang_live.models.host_copy import copy_to

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


@dataclass(frozen=True, slots=True, eq=False)
class FlowBatch:
    """Tensors of a batch, whose begin and steps write into the last four.

    rows: [n, n_positions + 3] int64: codes, and zeros behind them; then how many there are, how
        many have columns, and to how many attention is cut.
    prompts: [n, n_columns, n_mels], mel of the voices, and zeros behind it.
    speakers: [n, n_mels].
    x: [n, n_columns, n_mels], from noise to mel.
    given: [n_passes * n, n_columns, 3 * n_mels], what the estimator sees beside x.
    bias: [n_passes * n, 1, n_columns, n_columns], see layers.added.
    at: [1] int64, the next step.
    """

    rows: Tensor
    prompts: Tensor
    speakers: Tensor
    x: Tensor
    given: Tensor
    bias: Tensor
    at: Tensor


class TokenFlow:
    """
    Attributes:
        device, dtype: of its tensors.
        n_codes: of the codebook.
        n_steps: of the flow.
        is_mean: whether it flows by means of whole steps: few, without guidance.
        graphs: None until use_graphs.
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        """
        Args:
            tensors: as in flow.pt; copied.
            dtype: of weights and layers. What flows has at least float32: steps add up.
        """
        weights = Weights(tensors, device, dtype)
        self.device, self.dtype = device, dtype
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
        self.n_codes, n_mels = len(self._table), self._speaker.weight.shape[0]
        self._noise = seeded_noise(n_mels).to(device, state_dtype(dtype))
        mixer = f"{estimator}.time_embed_mixer"
        self.is_mean = weights.has(f"{mixer}.weight")
        # Otherwise each stream is once guided and once not.
        self._n_passes = 1 if self.is_mean else 2
        if self.is_mean:
            # Each step knows its begin and its end. Source: arXiv:2510.07979.
            ends = torch.linspace(0, 1, N_MEAN_STEPS + 1, device=device, dtype=self._noise.dtype)
            pairs = self._estimator.time(ends).unfold(0, 2, 1).transpose(1, 2).flatten(1)
            self._times = Linear(weights, mixer)(pairs)
        else:
            ends = step_ends(self._noise)
            self._times = self._estimator.time(ends[:-1])
        self._lengths, self.n_steps = ends.diff(), len(self._times)
        self.graphs: FlowGraphs | None = None

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

    def use_graphs(self, max_streams: int, capture: Capture | None = None) -> FlowGraphs:
        """
        Args:
            max_streams: of a batch.
            capture: CUDA graphs on this flow's device by default.
        """
        self.graphs = FlowGraphs(self, max_streams, capture or CudaCapture(self.device))
        return self.graphs

    def mels(self, inputs: Sequence[FlowInput]) -> list[Tensor]:
        """[n_mels, n_columns] of each stream: of all its codes that have columns, without those of
        its voice."""
        columns = [UPSAMPLING * (each.n_codes - each.n_ahead) for each in inputs]
        longest = max(columns) // UPSAMPLING
        found = None if self.graphs is None else self.graphs.run(inputs, longest)
        if found is None:
            n_positions = max(each.n_codes for each in inputs)
            batch = self.batch(len(inputs), longest, n_positions, self._empty)
            self.fill(batch, inputs)
            self.begin(batch)
            for _ in range(self.n_steps):
                self.step(batch)
            found = batch.x
        return [
            mel[len(each.voice.mel) : n].T
            for mel, each, n in zip(found, inputs, columns, strict=True)
        ]

    def batch(self, n: int, longest: int, n_positions: int, make: Make) -> FlowBatch:
        """longest: codes that have columns, of the longest stream. n_positions: codes of it."""
        n_columns, passes, n_mels = UPSAMPLING * longest, self._n_passes * n, self._noise.shape[1]
        return FlowBatch(
            rows=make("rows", (n, n_positions + 3), torch.int64),
            prompts=make("prompts", (n, n_columns, n_mels), self.dtype),
            speakers=make("speakers", (n, n_mels), self.dtype),
            x=make("x", (n, n_columns, n_mels), self._noise.dtype),
            given=make("given", (passes, n_columns, 3 * n_mels), self.dtype),
            bias=make("bias", (passes, 1, n_columns, n_columns), self.dtype),
            at=make("at", (1,), torch.int64),
        )

    def _empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def fill(self, batch: FlowBatch, inputs: Sequence[FlowInput]) -> None:
        """Rows of the batch behind the inputs have one code, and any speaker."""
        rows = torch.zeros(batch.rows.shape, dtype=torch.int64)
        rows[:, -3:] = 1
        batch.prompts.zero_()
        for i, (row, each) in enumerate(zip(rows, inputs, strict=False)):
            voice, n = each.voice, each.n_codes
            row[:n] = torch.cat((voice.codes, each.codes))
            row[-3:] = torch.tensor((n, n - each.n_ahead, each.chunk or n))
            batch.prompts[i, : len(voice.mel)] = voice.mel
        torch.stack([each.voice.speaker for each in inputs], out=batch.speakers[: len(inputs)])
        batch.rows.copy_(copy_to(rows, self.device))

    def begin(self, batch: FlowBatch) -> None:
        """What is computed once for all steps."""
        ids, (n_codes, lasts, cuts) = batch.rows[:, :-3], batch.rows[:, -3:].unbind(1)
        n, n_columns = batch.x.shape[:2]
        codes = F.embedding(ids, self._table)
        said = self._encoder(codes, n_codes, lasts, cuts, n_columns // UPSAMPLING)
        speakers = batch.speakers[:, None].expand_as(said)
        batch.given[n:].zero_()
        torch.cat((said, speakers, batch.prompts), 2, out=batch.given[:n])
        seen = visible(UPSAMPLING * lasts, UPSAMPLING * cuts, n_columns)
        batch.bias.copy_(added(seen, self.dtype).repeat(self._n_passes, 1, 1, 1))
        batch.x.copy_(self._noise[torch.arange(n_columns, device=self.device) % NOISE_COLUMNS])
        batch.at.zero_()

    def step(self, batch: FlowBatch) -> None:
        """The next one of Euler's method: with guidance in steps that become longer."""
        time = self._times.index_select(0, batch.at)
        x = batch.x.to(self.dtype).repeat(self._n_passes, 1, 1)
        moved = self._estimator(torch.cat((x, batch.given), 2), time, batch.bias).to(batch.x.dtype)
        if not self.is_mean:
            guided, free = moved.chunk(2)
            moved = free.lerp(guided, 1 + GUIDANCE)
        batch.x.addcmul_(self._lengths.index_select(0, batch.at), moved)
        batch.at.add_(1).remainder_(self.n_steps)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of what flows, whose steps add up, where layers compute in this one."""
    return torch.promote_types(dtype, torch.float32)


def seeded_noise(n_mels: int) -> Tensor:
    """[NOISE_COLUMNS, n_mels]."""
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(n_mels, NOISE_COLUMNS, generator=seeded).T.contiguous()


def step_ends(like: Tensor) -> Tensor:
    """[N_STEPS + 1], times from 0 to 1, in steps that become longer."""
    ends = torch.linspace(0, 1, N_STEPS + 1, device=like.device, dtype=like.dtype)
    return 1 - torch.cos(ends * 0.5 * math.pi)
