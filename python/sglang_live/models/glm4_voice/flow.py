"""GLM-4-Voice's codes to mel: an encoder of blocks, columns for its codes, and a guided flow.

In: all codes of streams so far, and the mel that was made of them, which the flow is given, as in
the reference. Out: the columns behind it. Noise is drawn by the number of all columns, as there.
Source: GLM-4-Voice, arXiv:2412.02612 (cosyvoice/flow), which is CosyVoice 1, arXiv:2407.05407;
classifier-free guidance: arXiv:2207.12598.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_live.models.codecs.flow.encoder import BlockEncoder
from sglang_live.models.codecs.flow.layers import Linear
from sglang_live.models.codecs.flow.mels import GUIDANCE, N_STEPS, state_dtype
from sglang_live.models.codecs.flow.whole_estimator import Block, Conv, WholeEstimator
from sglang_live.models.codecs.snac import Weights
from sglang_live.models.host_copy import copy_to

# Codes to which the encoder's attention is cut, and those of a second.
BLOCK, CODES_PER_S = 10, 12.5
RATE_HZ, SAMPLES_PER_COLUMN = 22_050, 256
_NOISE_SEED = 42


def n_columns(n_codes: int) -> int:
    """Of mel. The reference computes it in float32, which is the same for less than 3,392 codes."""
    return 441 * n_codes // 64


@dataclass(frozen=True, slots=True, eq=False)
class SpokenCodes:
    """One stream's part of a batch.

    codes: [n] int64 so far, on the CPU; at least one.
    mel: [n_mels, n_made], the first columns, which are known.
    """

    codes: Tensor
    mel: Tensor


class BlockFlow:
    """
    Attributes:
        device: of its tensors.
        dtype: of mel.
        n_codes: of the codebook.
        no_mel: [n_mels, 0].
    """

    def __init__(self, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype):
        """Args: see TokenFlow."""
        weights = Weights(tensors, device, dtype)
        self.device, self.dtype = device, state_dtype(dtype)
        self._table = weights.take("input_embedding.weight")
        self._encoder = BlockEncoder(weights, "encoder")
        regulator = "length_regulator.model"
        # Of each three, the last one is an activation.
        n_blocks = weights.count(regulator) // 2
        self._smooth = [
            Block(weights, f"{regulator}.{at}", f"{regulator}.{at + 1}", 1)
            for at in range(0, 3 * n_blocks, 3)
        ]
        self._to_mel = Conv(weights, f"{regulator}.{3 * n_blocks}")
        self._estimator = WholeEstimator(weights, "decoder.estimator")
        self.n_codes = len(self._table)
        # Of no one: the reference gives the flow a speaker of zeros.
        speaker = Linear(weights, "spk_embed_affine_layer")
        self._speaker = speaker(torch.zeros(speaker.weight.shape[1], device=device, dtype=dtype))
        self.no_mel = self._speaker.new_empty(len(self._speaker), 0, dtype=self.dtype)

    def mels(self, inputs: Sequence[SpokenCodes]) -> list[Tensor]:
        """[n_mels, n] of each stream: of all its codes, without the columns that are known."""
        alike: dict[int, list[int]] = defaultdict(list)
        for i, each in enumerate(inputs):
            alike[len(each.codes)].append(i)
        found: dict[int, Tensor] = {}
        for rows in alike.values():
            found |= zip(rows, self._of_equal_length([inputs[i] for i in rows]), strict=True)
        return [found[i] for i in range(len(inputs))]

    def _of_equal_length(self, inputs: list[SpokenCodes]) -> list[Tensor]:
        codes = copy_to(torch.stack([each.codes for each in inputs]), self.device)
        said = self._encoder(F.embedding(codes, self._table), BLOCK).transpose(1, 2)
        said = F.interpolate(said, size=n_columns(codes.shape[1]), mode="nearest")
        for block in self._smooth:
            said = block(said)
        said = self._to_mel(said)
        known = torch.zeros_like(said)
        for row, each in zip(known, inputs, strict=True):
            row[:, : each.mel.shape[1]] = each.mel
        speakers = self._speaker[:, None].expand_as(said)
        mel = self._guided(torch.cat((said, speakers, known), 1))
        return [columns[:, each.mel.shape[1] :] for columns, each in zip(mel, inputs, strict=True)]

    def _guided(self, given: Tensor) -> Tensor:
        """[n_streams, n_mels, n_columns] of [n_streams, 3 * n_mels, n_columns], by Euler's method
        in steps that become longer."""
        shape = len(self._speaker), given.shape[2]
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(_NOISE_SEED))
        x = copy_to(noise, self.device, self.dtype).expand(len(given), -1, -1)
        ends = torch.linspace(0, math.pi / 2, N_STEPS + 1, device=x.device, dtype=x.dtype).cos()
        # Each stream is once guided and once not.
        both = torch.cat((given, torch.zeros_like(given)))
        for time, length in zip(self._estimator.time(1 - ends[:-1]), -ends.diff(), strict=True):
            at_once = torch.cat((x.to(both.dtype).repeat(2, 1, 1), both), 1)
            guided, free = self._estimator(at_once, time[None]).to(x.dtype).chunk(2)
            x = x + length * (guided + GUIDANCE * (guided - free))
        return x
