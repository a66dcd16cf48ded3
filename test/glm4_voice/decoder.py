"""GLM-4-Voice's codes to mel to sound, one call for one stream: a restatement in plain PyTorch.

Source: THUDM/GLM-4-Voice eb00ce9 (cosyvoice/flow, cosyvoice/transformer, cosyvoice/hifigan,
flow_inference.py, web_demo.py). The names of the weights are those of flow.pt and hift.pt. Nothing
is batched, and each call has the noise that its seed draws.
"""

import math
from collections import defaultdict
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from test.flow.checkpoint import HARMONICS, noise_at
from test.flow.reference import (
    N_MELS,
    ConformerLayer,
    Embed,
    TransformerLayer,
    Unit,
    centred,
    distances,
)

BLOCK, WIDTH, N_CODES = 10, 32, 96
CODES_PER_S, RATE_HZ = 12.5, 22050
CONFIG = """\
__set_seed1: !apply:random.seed [1986]
sample_rate: 22050
spk_embed_dim: 192
flow: !new:cosyvoice.flow.flow.MaskedDiffWithXvec
    spk_embed_dim: !ref <spk_embed_dim>
    input_frame_rate: 12.5
    encoder: !new:cosyvoice.transformer.encoder.BlockConformerEncoder
        block_size: 10
    length_regulator: !new:cosyvoice.flow.length_regulator.InterpolateRegulator
        sampling_ratios: [1, 1, 1, 1]
hift: !new:cosyvoice.hifigan.generator.HiFTGenerator
    sampling_rate: !ref <sample_rate>
"""


class Encoder(nn.Module):
    def __init__(self, n_layers: int):
        super().__init__()
        self.embed, self.after_norm = Embed(WIDTH), nn.LayerNorm(WIDTH)
        self.encoders = nn.ModuleList(ConformerLayer(WIDTH, 2, 48) for _ in range(n_layers))
        for layer in self.encoders:
            layer.norm_ff, layer.norm_mha = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[n, WIDTH] of [n, WIDTH]; each sees what is before it, and its block."""
        mask = torch.tril(torch.ones(len(x), len(x)))
        for i in range(len(x)):
            begin = i // BLOCK * BLOCK
            mask[i, begin : begin + BLOCK] = 1
        bias = -1e10 * (1 - mask).to(x.dtype)
        x, table = self.embed(x), distances(len(x), WIDTH, x.dtype)
        for layer in self.encoders:
            x = layer(x, table, bias)
        return self.after_norm(x)


class Regulator(nn.Module):
    def __init__(self):
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(4):
            conv = nn.Conv1d(N_MELS, N_MELS, 3, 1, 1)
            parts += [conv, nn.GroupNorm(1, N_MELS), nn.Mish()]
        self.model = nn.Sequential(*parts, nn.Conv1d(N_MELS, N_MELS, 1, 1))

    def forward(self, x: Tensor, n: int) -> Tensor:
        """[1, N_MELS, n] of [n_codes, N_MELS]."""
        return self.model(F.interpolate(x.T[None], size=n, mode="nearest"))


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        conv = nn.Conv1d(n_in, n_out, 3, padding=1)
        self.block = nn.Sequential(conv, nn.GroupNorm(8, n_out), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Resnet(nn.Module):
    def __init__(self, n_in: int, n_out: int, n_time: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Mish(), nn.Linear(n_time, n_out))
        self.block1, self.block2 = Block(n_in, n_out), Block(n_out, n_out)
        self.res_conv = nn.Conv1d(n_in, n_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.block2(self.block1(x) + self.mlp(time)[..., None]) + self.res_conv(x)


class Named(nn.Module):
    """Matcha-TTS's Downsample1D and Upsample1D."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Estimator(nn.Module):
    def __init__(self, n_layers: int, n_mid: int):
        super().__init__()
        self.n_in, n_time = 4 * N_MELS, 4 * WIDTH
        self.time_mlp = nn.ModuleDict(
            {"linear_1": nn.Linear(self.n_in, n_time), "linear_2": nn.Linear(n_time, n_time)}
        )

        def stage(n_in: int, *more: nn.Module) -> nn.ModuleList:
            layers = [TransformerLayer(WIDTH, n_heads=2, head_dim=64) for _ in range(n_layers)]
            return nn.ModuleList([Resnet(n_in, WIDTH, n_time), nn.ModuleList(layers), *more])

        def conv() -> nn.Module:
            return nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

        down = Named(nn.Conv1d(WIDTH, WIDTH, 3, 2, 1))
        up = Named(nn.ConvTranspose1d(WIDTH, WIDTH, 4, 2, 1))
        self.down_blocks = nn.ModuleList([stage(self.n_in, down), stage(WIDTH, conv())])
        self.mid_blocks = nn.ModuleList(stage(WIDTH) for _ in range(n_mid))
        self.up_blocks = nn.ModuleList([stage(2 * WIDTH, up), stage(2 * WIDTH, conv())])
        self.final_block, self.final_proj = Block(WIDTH, WIDTH), nn.Conv1d(WIDTH, N_MELS, 1)

    def forward(self, x: Tensor, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor) -> Tensor:
        """[1, N_MELS, n] of x, mu and cond of this shape; t: []; speaker: [1, N_MELS]."""
        half = self.n_in // 2
        rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angles = 1000 * t[None, None] * rates[None]
        waves = torch.cat((angles.sin(), angles.cos()), 1).to(x.dtype)
        time = self.time_mlp["linear_2"](F.silu(self.time_mlp["linear_1"](waves)))

        def through(stage: nn.ModuleList, x: Tensor) -> Tensor:
            x = stage[0](x, time).transpose(1, 2)
            for layer in stage[1]:
                x = layer(x, torch.ones(x.shape[1], x.shape[1]).to(x))
            return x.transpose(1, 2)

        x = torch.cat((x, mu, speaker[..., None].expand(-1, -1, x.shape[2]), cond), 1)
        hiddens = []
        for stage in self.down_blocks:
            x = through(stage, x)
            hiddens.append(x)
            x = stage[2](x)
        for stage in self.mid_blocks:
            x = through(stage, x)
        for stage in self.up_blocks:
            skip = hiddens.pop()
            x = torch.cat((x[:, :, : skip.shape[2]], skip), 1)
            x = stage[2](through(stage, x))
        return self.final_proj(self.final_block(x))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_embedding = nn.Embedding(N_CODES, WIDTH)
        self.spk_embed_affine_layer = nn.Linear(192, N_MELS)
        self.encoder, self.encoder_proj = Encoder(n_layers=2), nn.Linear(WIDTH, N_MELS)
        self.length_regulator = Regulator()
        self.decoder = nn.ModuleDict({"estimator": Estimator(n_layers=1, n_mid=2)})

    @torch.inference_mode()
    def forward(self, codes: Tensor, prompt_codes: Tensor, prompt_mel: Tensor) -> Tensor:
        """[N_MELS, n] of codes [n_codes], without those of the prompt; prompt_mel: [N_MELS, n]."""
        weight = self.spk_embed_affine_layer.weight
        embedding = F.normalize(torch.zeros(1, 192).to(weight), dim=1)
        speaker = self.spk_embed_affine_layer(embedding)
        codes = torch.cat((prompt_codes, codes))
        h = self.encoder_proj(self.encoder(self.input_embedding(codes)))
        n = torch.tensor([len(codes)], dtype=torch.int32)
        n_columns = int((n / CODES_PER_S * 22050 / 256).int())
        mu = self.length_regulator(h, n_columns)
        cond = torch.zeros_like(mu)
        cond[0, :, : prompt_mel.shape[1]] = prompt_mel
        torch.manual_seed(42)
        x = torch.randn(mu.shape).to(mu)
        span = 1 - torch.cos(torch.linspace(0, 1, 11, dtype=mu.dtype) * 0.5 * torch.pi)
        t, length, estimator = span[0], span[1] - span[0], self.decoder["estimator"]
        for step in range(1, 11):
            moved = estimator(x, mu, t, speaker, cond)
            zeros = torch.zeros_like(mu)
            free = estimator(x, zeros, t, torch.zeros_like(speaker), zeros)
            x = x + length * ((1.0 + 0.7) * moved - 0.7 * free)
            t = t + length
            if step < 10:
                length = span[step + 1] - t
        return x[0, :, prompt_mel.shape[1] :]


class Hift(nn.Module):
    """Of 8 * 8 * 4 samples of a column."""

    def __init__(self, width: int, n_pitch: int):
        super().__init__()
        condnet: list[nn.Module] = []
        for i in range(5):
            condnet += [centred(n_pitch if i else N_MELS, n_pitch, 3), nn.ELU()]
        self.f0_predictor = nn.ModuleDict(
            {"condnet": nn.Sequential(*condnet), "classifier": nn.Linear(n_pitch, 1)}
        )
        self.m_source = nn.ModuleDict({"l_linear": nn.Linear(9, 1)})
        self.conv_pre = centred(N_MELS, width, 7)
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(width >> i, width >> (i + 1), 16, 8, padding=4))
            for i in range(2)
        )
        widths = [width >> (i + 1) for i in range(2)]
        self.source_downs = nn.ModuleList(
            [nn.Conv1d(18, widths[0], 16, 8, padding=4), nn.Conv1d(18, widths[1], 1)]
        )
        self.source_resblocks = nn.ModuleList(
            Unit(w, k) for w, k in zip(widths, (7, 11), strict=True)
        )
        self.resblocks = nn.ModuleList(Unit(w, k) for w in widths for k in (3, 7, 11))
        self.conv_post = centred(widths[-1], 18, 7)
        seeded = torch.Generator().manual_seed(0)
        self.phases = torch.pi * (2 * torch.rand(HARMONICS, generator=seeded) - 1)
        self.phases[0] = 0

    def source(self, mel: Tensor, place: int) -> Tensor:
        """[n_samples]; place: of its first sample among those of all mel, for the noise."""
        hidden = self.f0_predictor["condnet"](mel[None])[0]
        pitch = self.f0_predictor["classifier"](hidden.T)[:, 0].abs()
        f0 = pitch.repeat_interleave(256)
        turns = torch.stack([f0 * (i + 1) / RATE_HZ for i in range(9)])
        theta = 2 * math.pi * (torch.cumsum(turns, 1) % 1) + self.phases.to(mel.dtype)[:, None]
        voiced = (f0 > 10).to(mel.dtype)[:, None]
        loud = voiced * 0.003 + (1 - voiced) * 0.1 / 3
        waves = 0.1 * torch.sin(theta).T * voiced + loud * noise_at(place, len(f0)).to(mel.dtype)
        return torch.tanh(self.m_source["l_linear"](waves))[:, 0]

    @torch.inference_mode()
    def forward(self, mel: Tensor, place: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Sound and source, [n_samples], of mel [N_MELS, n]; kept: of the source, its begin."""
        source = self.source(mel, place)
        source[: len(kept)] = kept
        window = torch.hann_window(16, dtype=mel.dtype)
        spectrum = torch.view_as_real(
            torch.stft(source[None], 16, 4, 16, window, return_complex=True)
        )
        parts = torch.cat((spectrum[..., 0], spectrum[..., 1]), 1)
        x = self.conv_pre(mel[None])
        for i in range(2):
            x = self.ups[i](F.leaky_relu(x, 0.1))
            if i == 1:
                x = torch.cat((x[..., 1:2], x), 2)
            x = x + self.source_resblocks[i](self.source_downs[i](parts))
            x = sum(self.resblocks[3 * i + j](x) for j in range(3)) / 3
        x = self.conv_post(F.leaky_relu(x))
        loud, phase = torch.exp(x[:, :9]).clip(max=1e2), torch.sin(x[:, 9:])
        spectrum = torch.complex(loud * torch.cos(phase), loud * torch.sin(phase))
        return torch.istft(spectrum, 16, 4, 16, window)[0].clamp(-0.99, 0.99), source


class Demo:
    """One response, as the published demo makes it alone.

    Attributes:
        calls: of the flow, each with its codes, the codes and mel of its prompt, and its mel.
        waves: [n_samples] of each block, at RATE_HZ.
    """

    def __init__(self, flow: Flow, hift: Hift):
        self.flow, self.hift = flow, hift
        self.calls: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.waves: list[Tensor] = []
        self.kept: dict[str, Tensor] = defaultdict(lambda: flow.encoder_proj.weight.new_zeros(0))
        self.place = 0

    def run(self, codes: list[int]) -> None:
        """Codes come one by one, and behind them the id that ends the response."""
        empty = self.flow.encoder_proj.weight.new_zeros(N_MELS, 0)
        sizes, at, mels = [25, 50, 100, 150, 200], 0, [empty]
        came: list[int] = []
        done: list[int] = []
        for code in [*codes, None]:
            is_end = code is None
            if len(came) >= sizes[at] or (is_end and came):
                at = min(at + 1, len(sizes) - 1)
                prompt = torch.tensor(done, dtype=torch.int64), torch.cat(mels, 1)
                mels.append(self.token2wav(torch.tensor(came), *prompt, is_end))
                done, came = done + came, []
            if not is_end:
                came.append(code)

    def token2wav(self, codes: Tensor, prompt: Tensor, prompt_mel: Tensor, is_end: bool) -> Tensor:
        mel = self.flow(codes, prompt, prompt_mel)
        self.calls.append((codes, prompt, prompt_mel, mel))
        mel, window = mel.clone(), torch.from_numpy(np.hamming(68)).to(mel)
        if self.waves:
            mel[:, :34] = mel[:, :34] * window[:34] + self.kept["overlap"] * window[34:]
            mel = torch.cat((self.kept["mel"], mel), 1)
        self.kept["overlap"] = mel[:, -34:]
        if not is_end:
            mel = mel[:, :-34]
        sound, source = self.hift(mel, self.place, self.kept["source"])
        self.kept |= {"mel": mel[:, -1:], "source": source[-256:]}
        self.waves.append(sound if is_end else sound[:-256])
        self.place += len(self.waves[-1])
        return mel


@cache
def modules() -> tuple[Flow, Hift]:
    """In float32; with large enough weights that each layer matters."""
    torch.manual_seed(6)
    flow, hift = Flow().eval(), Hift(16, n_pitch=8).eval()
    with torch.no_grad():
        for name, weight in flow.named_parameters():
            if weight.ndim > 1 and "input_embedding" not in name:
                weight *= 1.5
        # In Hz: some columns have a voice, others none.
        hift.f0_predictor["classifier"].weight *= 400.0
        hift.conv_post.parametrizations.weight.original0 *= 2.0
    return flow, hift


def demo(codes: list[int], dtype: torch.dtype) -> Demo:
    flow, hift = (module.to(dtype) for module in modules())
    made = Demo(flow, hift)
    try:
        made.run(codes)
    finally:
        flow.float(), hift.float()
    return made


def save(path: Path) -> None:
    """In the files of its folder."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(CONFIG)
    flow, hift = modules()
    torch.save(flow.state_dict(), path / "flow.pt")
    torch.save(hift.state_dict(), path / "hift.pt")
