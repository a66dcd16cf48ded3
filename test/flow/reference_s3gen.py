"""What Chatterbox's S3Gen has in the place of parts of CosyVoice 2's decoder, restated.

Source: resemble-ai/chatterbox 5de7a54 (models/s3gen: s3gen.py, flow_matching.py, decoder.py,
hifigan.py). A whole piece is one call.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.flow import reference
from test.flow.reference import N_MELS


class Hift(reference.Hift):
    """phases: [9], of the harmonics."""

    def __init__(self, width: int, n_pitch: int, noise, phases: Tensor):
        super().__init__(width, n_pitch, noise)
        self.phases = phases

    def source(self, mel: Tensor, place: int) -> tuple[Tensor, Tensor]:
        hidden = self.f0_predictor["condnet"](mel[None])[0]
        pitch = self.f0_predictor["classifier"](hidden.T)[:, 0].abs()
        f0 = pitch.repeat_interleave(480)[:, None]
        turns = torch.stack([f0[:, 0] * (i + 1) / 24000 for i in range(9)])
        theta = 2 * math.pi * (torch.cumsum(turns, 1) % 1) + self.phases.to(mel.dtype)[:, None]
        voiced = (f0 > 10).to(mel.dtype)
        loud = voiced * 0.003 + (1 - voiced) * 0.1 / 3
        waves = 0.1 * torch.sin(theta).T * voiced + loud * self.noise(0, len(f0)).to(mel.dtype)
        return torch.tanh(self.m_source["l_linear"](waves))[:, 0], pitch


class MeanEstimator(reference.Estimator):
    def __init__(self, width: int, n_heads: int, head_dim: int, n_layers: int, n_mid: int):
        super().__init__(width, n_heads, head_dim, n_layers, n_mid)
        self.time_embed_mixer = nn.Linear(8 * width, 4 * width, bias=False)

    def embedded(self, t: Tensor) -> Tensor:
        """The time is that of a step's begin and end, [2]."""
        begin, end = (super(MeanEstimator, self).embedded(each[None]) for each in t)
        return self.time_embed_mixer(torch.cat((begin, end), 1))


class MeanFlow(reference.Flow):
    def solve(self, mu: Tensor, speaker: Tensor, prompt: Tensor, streaming: bool) -> Tensor:
        cond = torch.zeros_like(mu)
        cond[0, :, : len(prompt)] = prompt.T
        x, ends = self.noise[:, :, : mu.shape[2]].to(mu.dtype), torch.linspace(0, 1, 3).to(mu)
        for t, r in pairwise(ends):
            moved = self.decoder["estimator"](
                x, mu, torch.stack((t, r)), speaker[None], cond, streaming=False
            )
            x = x + (r - t) * moved
        return x


class S3Gen(nn.Module):
    def __init__(self, flow: reference.Flow, hift: Hift):
        super().__init__()
        self.flow, self.mel2wav = flow, hift

    @torch.inference_mode()
    def forward(self, codes: Tensor, voice: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Mel [N_MELS, n_columns] and sound [n_samples] of codes [n]."""
        if isinstance(self.flow, MeanFlow):
            codes = F.pad(codes, (0, 3), value=4299)
        mel = self.flow(codes, *voice, streaming=False, finalize=True)
        assert mel.shape[0] == N_MELS
        sound = self.mel2wav(mel, 0, mel.new_zeros(0))[0]
        fade = torch.zeros(960, dtype=mel.dtype)
        fade[480:] = (torch.cos(torch.linspace(math.pi, 0, 480, dtype=mel.dtype)) + 1) / 2
        sound[:960] *= fade
        return mel, sound
