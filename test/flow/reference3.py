"""What CosyVoice 3 has in the place of CosyVoice 2's encoder, estimator and HiFT, restated.

Source: FunAudioLLM/CosyVoice ace7c47 (flow/flow.py: CausalMaskedDiffWithDiT, flow/DiT, hifigan/:
CausalHiFTGenerator, cli/model.py: CosyVoice3Model), x-transformers 2.11 for the rotations.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from test.flow.reference import AHEAD, HOP, MEL_HOP, N_MELS, Unit, chunk_bias, euler


class CausalPlaces(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Sequential(nn.Conv1d(width, width, 31, groups=16), nn.Mish()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(F.pad(x.transpose(1, 2), (30, 0)))
        return self.conv2(F.pad(x, (30, 0))).transpose(1, 2)


def rotated(x: Tensor, head_dim: int) -> Tensor:
    """x: [n, n_positions, n_heads * head_dim], of which the reference turns the first head_dim."""
    rates = 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    angles = torch.outer(torch.arange(x.shape[1]).float(), rates)
    angles = torch.stack((angles, angles), 2).flatten(1).to(x.dtype)
    turned, rest = x[..., :head_dim], x[..., head_dim:]
    crossed = torch.empty_like(turned)
    crossed[..., 0::2], crossed[..., 1::2] = -turned[..., 1::2], turned[..., 0::2]
    return torch.cat((turned * angles.cos() + crossed * angles.sin(), rest), 2)


class Layer(nn.Module):
    def __init__(self, width: int, n_heads: int, head_dim: int):
        super().__init__()
        self.n_heads, self.head_dim, inner = n_heads, head_dim, n_heads * head_dim
        self.attn_norm = nn.ModuleDict({"linear": nn.Linear(width, 6 * width)})
        self.attn = nn.ModuleDict(
            {f"to_{part}": nn.Linear(width, inner) for part in "qkv"}
            | {"to_out": nn.ModuleList([nn.Linear(inner, width)])}
        )
        enter = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"))
        self.ff = nn.ModuleDict(
            {"ff": nn.Sequential(enter, nn.Identity(), nn.Linear(2 * width, width))}
        )

    def forward(self, x: Tensor, time: Tensor, bias: Tensor) -> Tensor:
        parts = self.attn_norm["linear"](F.silu(time)).chunk(6, 1)
        shift, scale, gate, shift_ff, scale_ff, gate_ff = (part[:, None] for part in parts)

        def norm(x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[2:], eps=1e-6)

        y = norm(x) * (1 + scale) + shift
        q, k, v = (self.attn[f"to_{part}"](y) for part in "qkv")
        q, k = rotated(q, self.head_dim), rotated(k, self.head_dim)
        q, k, v = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in (q, k, v)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(self.head_dim) + bias
        found = (scores.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = x + gate * self.attn["to_out"][0](found)
        return x + gate_ff * self.ff["ff"](norm(x) * (1 + scale_ff) + shift_ff)


class DiT(nn.Module):
    def __init__(self, width: int, n_heads: int, head_dim: int, n_layers: int):
        super().__init__()
        times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.time_embed = nn.ModuleDict({"time_mlp": times})
        self.input_embed = nn.ModuleDict(
            {"proj": nn.Linear(4 * N_MELS, width), "conv_pos_embed": CausalPlaces(width)}
        )
        self.transformer_blocks = nn.ModuleList(
            Layer(width, n_heads, head_dim) for _ in range(n_layers)
        )
        self.norm_out = nn.ModuleDict({"linear": nn.Linear(width, 2 * width)})
        self.proj_out = nn.Linear(width, N_MELS)

    def forward(
        self, x: Tensor, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, streaming: bool
    ) -> Tensor:
        """See reference.Estimator."""
        n = x.shape[2]
        rates = torch.exp(torch.arange(128).float() * -(math.log(10000) / 127))
        angles = 1000 * t[:, None] * rates[None]
        time = torch.cat((angles.sin(), angles.cos()), 1).to(x.dtype)
        time = self.time_embed["time_mlp"](time)
        parts = (x, cond, mu, speaker[..., None].expand(-1, -1, n))
        hidden = self.input_embed["proj"](torch.cat(parts, 1).transpose(1, 2))
        hidden = self.input_embed["conv_pos_embed"](hidden) + hidden
        bias = chunk_bias(n, MEL_HOP * streaming, x.dtype)
        for layer in self.transformer_blocks:
            hidden = layer(hidden, time, bias)
        scale, shift = self.norm_out["linear"](F.silu(time)).chunk(2, 1)
        hidden = F.layer_norm(hidden, hidden.shape[2:], eps=1e-6)
        hidden = hidden * (1 + scale)[:, None] + shift[:, None]
        return self.proj_out(hidden).transpose(1, 2)


class Flow(nn.Module):
    """See reference.Flow."""

    def __init__(self, n_codes: int, n_look: int, estimator: DiT):
        super().__init__()
        self.input_embedding = nn.Embedding(n_codes, N_MELS)
        self.spk_embed_affine_layer = nn.Linear(192, N_MELS)
        self.pre_lookahead_layer = nn.ModuleDict(
            {"conv1": nn.Conv1d(N_MELS, n_look, AHEAD + 1), "conv2": nn.Conv1d(n_look, N_MELS, 3)}
        )
        self.decoder = nn.ModuleDict({"estimator": estimator})
        torch.manual_seed(0)
        self.noise = torch.randn([1, N_MELS, 50 * 300])

    @torch.inference_mode()
    def forward(
        self,
        codes: Tensor,
        prompt_codes: Tensor,
        prompt_mel: Tensor,
        embedding: Tensor,
        streaming: bool,
        finalize: bool,
    ) -> Tensor:
        speaker = self.spk_embed_affine_layer(F.normalize(embedding, dim=0))
        x = self.input_embedding(torch.cat((prompt_codes, codes)))
        ahead = F.pad(x, (0, 0, 0, AHEAD)) if finalize else x
        x = x if finalize else x[:-AHEAD]
        look = self.pre_lookahead_layer
        y = F.leaky_relu(look["conv1"](ahead.T[None]))
        h = look["conv2"](F.pad(y, (2, 0)))[0].T + x
        mu = h.repeat_interleave(2, 0).T[None]
        mel = euler(self.decoder["estimator"], self.noise, mu, speaker, prompt_mel, streaming)
        return mel[0, :, len(prompt_mel) :]


def causal(n_in: int, n_out: int, kernel: int, dilation: int = 1) -> nn.Module:
    class Left(nn.Conv1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.pad(x, ((kernel - 1) * dilation, 0)))

    return weight_norm(Left(n_in, n_out, kernel, dilation=dilation))


class Hift(nn.Module):
    """noise: [n_samples, 9] from a sample's place on."""

    LOOK_PITCH, LOOK = 3, 4

    def __init__(self, width: int, n_pitch: int, noise):
        super().__init__()
        self.noise = noise
        condnet: list[nn.Module] = [weight_norm(nn.Conv1d(N_MELS, n_pitch, 4)), nn.ELU()]
        for _ in range(4):
            condnet += [causal(n_pitch, n_pitch, 3), nn.ELU()]
        self.f0_predictor = nn.ModuleDict(
            {"condnet": nn.Sequential(*condnet), "classifier": nn.Linear(n_pitch, 1)}
        )
        self.m_source = nn.ModuleDict({"l_linear": nn.Linear(9, 1)})
        self.conv_pre = weight_norm(nn.Conv1d(N_MELS, width, 5))
        self.up_rates = (8, 5, 3)
        self.ups = nn.ModuleList(
            causal(width >> i, width >> (i + 1), k) for i, k in enumerate((16, 11, 7))
        )
        widths = [width >> (i + 1) for i in range(3)]
        self.source_downs = nn.ModuleList(
            nn.Conv1d(18, w, max(1, 2 * u) if u > 1 else 1, u)
            for w, u in zip(widths, (15, 3, 1), strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            Unit(w, k, causal) for w, k in zip(widths, (7, 7, 11), strict=True)
        )
        self.resblocks = nn.ModuleList(Unit(w, k, causal) for w in widths for k in (3, 7, 11))
        self.conv_post = causal(widths[-1], 18, 7)

    @torch.inference_mode()
    def forward(self, mel: Tensor, finalize: bool) -> Tensor:
        """[n_samples] of all columns of a stream, mel [N_MELS, n]; those that are final."""
        dtype = mel.dtype
        predictor = self.f0_predictor.double()
        exact = mel[None].double()
        exact = F.pad(exact, (0, self.LOOK_PITCH)) if finalize else exact
        pitch = predictor["classifier"](predictor["condnet"](exact).transpose(1, 2))[0, :, 0].abs()
        self.f0_predictor.to(dtype)
        f0 = pitch.to(dtype).repeat_interleave(480)[:, None]
        turns = (f0 * torch.arange(1, 10) / 24000) % 1
        turns = F.interpolate(turns.T[None], scale_factor=1 / 480, mode="linear")
        phase = torch.cumsum(turns, 2) * 2 * torch.pi * 480
        phase = F.interpolate(phase, scale_factor=480.0, mode="nearest")[0].T
        voiced = (f0 > 10).to(dtype)
        loud = voiced * 0.003 + (1 - voiced) * 0.1 / 3
        waves = torch.sin(phase) * 0.1 * voiced + loud * self.noise(0, len(f0)).to(dtype)
        source = torch.tanh(self.m_source["l_linear"](waves))[:, 0]
        window = torch.hann_window(16, dtype=dtype)
        spectrum = torch.view_as_real(
            torch.stft(source[None], 16, 4, 16, window, return_complex=True)
        )
        parts = torch.cat((spectrum[..., 0], spectrum[..., 1]), 1)
        if finalize:
            x = self.conv_pre(F.pad(mel[None], (0, self.LOOK)))
        else:
            x = self.conv_pre(mel[None, :, : -self.LOOK_PITCH])
            parts = parts[..., : -120 * self.LOOK]
        for i, rate in enumerate(self.up_rates):
            x = self.ups[i](F.interpolate(F.leaky_relu(x, 0.1), scale_factor=rate, mode="nearest"))
            if i == 2:
                x = torch.cat((x[..., 1:2], x), 2)
            down = self.source_downs[i]
            x = x + self.source_resblocks[i](down(F.pad(parts, (down.stride[0] - 1, 0))))
            x = sum(self.resblocks[3 * i + j](x) for j in range(3)) / 3
        x = self.conv_post(F.leaky_relu(x))
        loud, phase = torch.exp(x[:, :9]).clip(max=1e2), torch.sin(x[:, 9:])
        spectrum = torch.complex(loud * torch.cos(phase), loud * torch.sin(phase))
        wave = torch.istft(spectrum, 16, 4, 16, window)[0]
        return (wave if finalize else wave[:-480]).clamp(-0.99, 0.99)


class Stream:
    """See reference.Stream."""

    def __init__(self, flow: Flow, hift: Hift, voice: tuple[Tensor, Tensor, Tensor]):
        self.flow, self.hift, self.voice = flow, hift, voice

    def run(self, codes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        offset, hop, mels, waves, done = 0, HOP, [], [], 0
        pad = -len(self.voice[0]) % HOP
        while True:
            n = hop + pad if offset == 0 else hop
            is_end = len(codes) - offset < n + AHEAD
            known = codes if is_end else codes[: offset + n + AHEAD]
            mel = self.flow(known, *self.voice, streaming=not is_end, finalize=is_end)
            mels.append(mel[:, 2 * offset :])
            wave = self.hift(torch.cat(mels, 1), is_end)[done:]
            waves.append(wave)
            done += len(wave)
            if is_end:
                return mels, waves
            offset, hop = offset + n, min(100, 2 * hop)
