"""CosyVoice 2's codes to mel to sound, one call for one stream: a restatement in plain PyTorch.

Source: FunAudioLLM/CosyVoice ace7c47 (flow/, transformer/, hifigan/, cli/model.py). The names of
the weights are those of flow.pt and hift.pt. All is computed as there: padding, masks and caches
are written out, and nothing is batched but the guided pair.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

AHEAD, HOP, MEL_HOP = 3, 25, 50
N_MELS, OVERLAP = 80, 8


def chunk_bias(n: int, chunk: int, dtype: torch.dtype) -> Tensor:
    """[n, n], added to scores; chunk 0: all is seen."""
    at = torch.arange(n)
    ends = (at // chunk + 1) * chunk if chunk else torch.full((n,), n)
    return -1e10 * (at >= ends[:, None]).to(dtype)


# --- the encoder ---


class RelativeAttention(nn.Module):
    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        for part in ("q", "k", "v", "out"):
            setattr(self, f"linear_{part}", nn.Linear(width, width))
        self.linear_pos = nn.Linear(width, width, bias=False)
        self.pos_bias_u = nn.Parameter(torch.randn(n_heads, width // n_heads))
        self.pos_bias_v = nn.Parameter(torch.randn(n_heads, width // n_heads))

    def forward(self, x: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        """x: [n, width]; table: of distances, row n - 1 + d is that of the distance d."""
        n, heads = len(x), self.n_heads
        q, k, v = (
            linear(x).view(n, heads, -1) for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        places = self.linear_pos(table).view(2 * n - 1, heads, -1)
        found = torch.empty_like(q)
        at = torch.arange(n)
        for h in range(heads):
            content = (q[:, h] + self.pos_bias_u[h]) @ k[:, h].T
            by_distance = (q[:, h] + self.pos_bias_v[h]) @ places[:, h].T
            place = by_distance[at[:, None], n - 1 + at[:, None] - at[None]]
            scores = (content + place) / math.sqrt(q.shape[2]) + bias
            found[:, h] = scores.softmax(1) @ v[:, h]
        return self.linear_out(found.flatten(1))


class ConformerLayer(nn.Module):
    def __init__(self, width: int, n_heads: int, wide: int):
        super().__init__()
        self.self_attn = RelativeAttention(width, n_heads)
        self.feed_forward = nn.ModuleDict(
            {"w_1": nn.Linear(width, wide), "w_2": nn.Linear(wide, width)}
        )
        self.norm_ff = nn.LayerNorm(width, eps=1e-12)
        self.norm_mha = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_mha(x), table, bias)
        inner = F.silu(self.feed_forward["w_1"](self.norm_ff(x)))
        return x + self.feed_forward["w_2"](inner)


def distances(n: int, width: int, dtype: torch.dtype) -> Tensor:
    table = torch.zeros(2 * n - 1, width)
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * -(math.log(10000.0) / width))
    angles = torch.arange(1 - n, n)[:, None] * rates
    table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
    return table.to(dtype)


class Embed(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.out = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width, eps=1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * math.sqrt(x.shape[1])


class Encoder(nn.Module):
    def __init__(self, width: int, n_heads: int, wide: int, n_layers: int, n_up_layers: int):
        super().__init__()
        self.embed, self.up_embed = Embed(width), Embed(width)
        self.after_norm = nn.LayerNorm(width, eps=1e-5)
        self.pre_lookahead_layer = nn.ModuleDict(
            {"conv1": nn.Conv1d(width, width, AHEAD + 1), "conv2": nn.Conv1d(width, width, 3)}
        )
        self.encoders = nn.ModuleList(ConformerLayer(width, n_heads, wide) for _ in range(n_layers))
        self.up_layer = nn.ModuleDict({"conv": nn.Conv1d(width, width, 5)})
        self.up_encoders = nn.ModuleList(
            ConformerLayer(width, n_heads, wide) for _ in range(n_up_layers)
        )

    def forward(self, x: Tensor, context: Tensor, streaming: bool) -> Tensor:
        """[2 * n, width] of [n, width]; context: [AHEAD or 0, width]."""
        x, context = self.embed(x), self.embed(context)
        n, width = x.shape
        ahead = torch.cat((x, context)) if len(context) else F.pad(x, (0, 0, 0, AHEAD))
        look = self.pre_lookahead_layer
        y = F.leaky_relu(look["conv1"](ahead.T[None]))
        x = look["conv2"](F.pad(y, (2, 0)))[0].T + x
        table, bias = distances(n, width, x.dtype), chunk_bias(n, HOP * streaming, x.dtype)
        for layer in self.encoders:
            x = layer(x, table, bias)
        doubled = F.interpolate(x.T[None], scale_factor=2.0, mode="nearest")
        x = self.up_embed(self.up_layer["conv"](F.pad(doubled, (4, 0)))[0].T)
        table = distances(2 * n, width, x.dtype)
        bias = chunk_bias(2 * n, 2 * HOP * streaming, x.dtype)
        for layer in self.up_encoders:
            x = layer(x, table, bias)
        return self.after_norm(x)


# --- the estimator ---


class Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class CausalConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.block = nn.Sequential(
            CausalConv(n_in, n_out, 3), Transpose(), nn.LayerNorm(n_out), Transpose(), nn.Mish()
        )

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


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int, head_dim: int):
        super().__init__()
        self.n_heads, inner = n_heads, n_heads * head_dim
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, inner, bias=False) for _ in "qkv")
        self.to_out = nn.ModuleList([nn.Linear(inner, width)])

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + bias
        return self.to_out[0]((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self, width: int, n_heads: int, head_dim: int):
        super().__init__()
        self.norm1, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn1 = Attention(width, n_heads, head_dim)
        enter = nn.ModuleDict({"proj": nn.Linear(width, 4 * width)})
        self.ff = nn.ModuleDict(
            {"net": nn.ModuleList([enter, nn.Identity(), nn.Linear(4 * width, width)])}
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x), bias)
        enter, _, leave = self.ff["net"]
        return x + leave(F.gelu(enter["proj"](self.norm3(x))))


class Estimator(nn.Module):
    def __init__(self, width: int, n_heads: int, head_dim: int, n_layers: int, n_mid: int):
        super().__init__()
        self.n_in, n_time = 4 * N_MELS, 4 * width
        self.time_mlp = nn.ModuleDict(
            {"linear_1": nn.Linear(self.n_in, n_time), "linear_2": nn.Linear(n_time, n_time)}
        )

        def stage(n_in: int, *more: nn.Module) -> nn.ModuleList:
            layers = [TransformerLayer(width, n_heads, head_dim) for _ in range(n_layers)]
            return nn.ModuleList([Resnet(n_in, width, n_time), nn.ModuleList(layers), *more])

        self.down_blocks = nn.ModuleList([stage(self.n_in, CausalConv(width, width, 3))])
        self.mid_blocks = nn.ModuleList(stage(width) for _ in range(n_mid))
        self.up_blocks = nn.ModuleList([stage(2 * width, CausalConv(width, width, 3))])
        self.final_block = Block(width, width)
        self.final_proj = nn.Conv1d(width, N_MELS, 1)

    def embedded(self, t: Tensor) -> Tensor:
        half = self.n_in // 2
        rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
        angles = 1000 * t[:, None] * rates[None]
        waves = torch.cat((angles.sin(), angles.cos()), 1).to(t.dtype)
        return self.time_mlp["linear_2"](F.silu(self.time_mlp["linear_1"](waves)))

    def forward(
        self, x: Tensor, mu: Tensor, t: Tensor, speaker: Tensor, cond: Tensor, streaming: bool
    ) -> Tensor:
        """[n, N_MELS, n_columns] of x, mu and cond of this shape; t: [n]; speaker: [n, N_MELS]."""
        time = self.embedded(t)
        n = x.shape[2]
        bias = chunk_bias(n, MEL_HOP * streaming, x.dtype)

        def through(stage: nn.ModuleList, x: Tensor) -> Tensor:
            x = stage[0](x, time).transpose(1, 2)
            for layer in stage[1]:
                x = layer(x, bias)
            return x.transpose(1, 2)

        x = torch.cat((x, mu, speaker[..., None].expand(-1, -1, n), cond), 1)
        x = kept = through(self.down_blocks[0], x)
        x = self.down_blocks[0][2](x)
        for stage in self.mid_blocks:
            x = through(stage, x)
        x = through(self.up_blocks[0], torch.cat((x, kept), 1))
        return self.final_proj(self.final_block(self.up_blocks[0][2](x)))


class Flow(nn.Module):
    def __init__(self, n_codes: int, width: int, encoder: Encoder, estimator: Estimator):
        super().__init__()
        self.input_embedding = nn.Embedding(n_codes, width)
        self.spk_embed_affine_layer = nn.Linear(192, N_MELS)
        self.encoder, self.encoder_proj = encoder, nn.Linear(width, N_MELS)
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
        """[N_MELS, n_columns] of codes [n], without those of the prompt."""
        speaker = self.spk_embed_affine_layer(F.normalize(embedding, dim=0))
        x = self.input_embedding(torch.cat((prompt_codes, codes)))
        if finalize:
            h = self.encoder(x, x[:0], streaming)
        else:
            h = self.encoder(x[:-AHEAD], x[-AHEAD:], streaming)
        mu = self.encoder_proj(h).T[None]
        return self.solve(mu, speaker, prompt_mel, streaming)[0, :, len(prompt_mel) :]

    def solve(self, mu: Tensor, speaker: Tensor, prompt: Tensor, streaming: bool) -> Tensor:
        return euler(self.decoder["estimator"], self.noise, mu, speaker, prompt, streaming)


def euler(
    estimator: nn.Module,
    noise: Tensor,
    mu: Tensor,
    speaker: Tensor,
    prompt: Tensor,
    streaming: bool,
) -> Tensor:
    """[1, N_MELS, n_columns] of mu of this shape, in ten guided steps; prompt: [n, N_MELS]."""
    cond = torch.zeros_like(mu)
    cond[0, :, : len(prompt)] = prompt.T
    ends = 1 - torch.cos(torch.linspace(0, 1, 11, dtype=mu.dtype) * 0.5 * torch.pi)
    x = noise[:, :, : mu.shape[2]].to(mu.dtype)
    t, length = ends[0], ends[1] - ends[0]
    for step in range(1, 11):
        guided, free = estimator(
            x.expand(2, -1, -1),
            torch.cat((mu, torch.zeros_like(mu))),
            t.expand(2),
            torch.stack((speaker, torch.zeros_like(speaker))),
            torch.cat((cond, torch.zeros_like(cond))),
            streaming,
        )
        x = x + length * ((1.0 + 0.7) * guided - 0.7 * free)
        t = t + length
        if step < 10:
            length = ends[step + 1] - t
    return x


# --- HiFT ---


class Snake(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[None, :, None]
        return x + (1.0 / (alpha + 1e-9)) * torch.sin(x * alpha) ** 2


def centred(n_in: int, n_out: int, kernel: int, dilation: int = 1) -> nn.Module:
    padding = (kernel * dilation - dilation) // 2
    return weight_norm(nn.Conv1d(n_in, n_out, kernel, dilation=dilation, padding=padding))


class Unit(nn.Module):
    def __init__(self, width: int, kernel: int, conv=centred):
        super().__init__()
        self.convs1 = nn.ModuleList(conv(width, width, kernel, d) for d in (1, 3, 5))
        self.convs2 = nn.ModuleList(conv(width, width, kernel) for _ in range(3))
        self.activations1 = nn.ModuleList(Snake(width) for _ in range(3))
        self.activations2 = nn.ModuleList(Snake(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(3):
            y = self.convs1[i](self.activations1[i](x))
            x = self.convs2[i](self.activations2[i](y)) + x
        return x


class Hift(nn.Module):
    """Of 8 * 5 * 3 * 4 samples of a column. noise: [n_samples, 9] from a sample's place on."""

    def __init__(self, width: int, n_pitch: int, noise):
        super().__init__()
        self.noise = noise
        condnet: list[nn.Module] = []
        for i in range(5):
            condnet += [centred(n_pitch if i else N_MELS, n_pitch, 3), nn.ELU()]
        self.f0_predictor = nn.ModuleDict(
            {"condnet": nn.Sequential(*condnet), "classifier": nn.Linear(n_pitch, 1)}
        )
        self.m_source = nn.ModuleDict({"l_linear": nn.Linear(9, 1)})
        self.conv_pre = centred(N_MELS, width, 7)
        ups = ((8, 16, 4), (5, 11, 3), (3, 7, 2))
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(width >> i, width >> (i + 1), k, u, padding=p))
            for i, (u, k, p) in enumerate(ups)
        )
        widths = [width >> (i + 1) for i in range(3)]
        downs = ((30, 15, 7), (6, 3, 1), (1, 1, 0))
        self.source_downs = nn.ModuleList(
            nn.Conv1d(18, w, k, u, padding=p) for w, (k, u, p) in zip(widths, downs, strict=True)
        )
        self.source_resblocks = nn.ModuleList(
            Unit(w, k) for w, k in zip(widths, (7, 7, 11), strict=True)
        )
        self.resblocks = nn.ModuleList(Unit(w, k) for w in widths for k in (3, 7, 11))
        self.conv_post = centred(widths[-1], 18, 7)

    def source(self, mel: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """[n_samples] and the pitch [n_columns]; place: of its first sample in the stream."""
        hidden = self.f0_predictor["condnet"](mel[None])[0]
        pitch = self.f0_predictor["classifier"](hidden.T)[:, 0].abs()
        f0 = pitch.repeat_interleave(480)[:, None]
        turns = (f0 * torch.arange(1, 10) / 24000) % 1
        turns = F.interpolate(turns.T[None], scale_factor=1 / 480, mode="linear")
        phase = torch.cumsum(turns, 2) * 2 * torch.pi * 480
        phase = F.interpolate(phase, scale_factor=480.0, mode="linear")[0].T
        voiced = (f0 > 10).to(mel.dtype)
        loud = voiced * 0.003 + (1 - voiced) * 0.1 / 3
        waves = torch.sin(phase) * 0.1 * voiced + loud * self.noise(place, len(f0)).to(mel.dtype)
        return torch.tanh(self.m_source["l_linear"](waves))[:, 0], pitch

    @torch.inference_mode()
    def forward(self, mel: Tensor, place: int, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Sound and source, [n_samples], of mel [N_MELS, n]; kept: of the source, its begin."""
        source = self.source(mel, place)[0]
        source[: len(kept)] = kept
        window = torch.hann_window(16, dtype=mel.dtype)
        spectrum = torch.view_as_real(
            torch.stft(source[None], 16, 4, 16, window, return_complex=True)
        )
        parts = torch.cat((spectrum[..., 0], spectrum[..., 1]), 1)
        x = self.conv_pre(mel[None])
        for i in range(3):
            x = self.ups[i](F.leaky_relu(x, 0.1))
            if i == 2:
                x = torch.cat((x[..., 1:2], x), 2)
            x = x + self.source_resblocks[i](self.source_downs[i](parts))
            x = sum(self.resblocks[3 * i + j](x) for j in range(3)) / 3
        x = self.conv_post(F.leaky_relu(x))
        loud, phase = torch.exp(x[:, :9]).clip(max=1e2), torch.sin(x[:, 9:])
        spectrum = torch.complex(loud * torch.cos(phase), loud * torch.sin(phase))
        return torch.istft(spectrum, 16, 4, 16, window)[0].clamp(-0.99, 0.99), source


# --- a stream ---


class Stream:
    """One response, as CosyVoice2Model.tts makes it alone, with its caches."""

    def __init__(self, flow: Flow, hift: Hift, voice: tuple[Tensor, Tensor, Tensor]):
        self.flow, self.hift, self.voice = flow, hift, voice
        self.kept: dict[str, Tensor] | None = None

    def run(self, codes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Mel [N_MELS, n_columns] and sound [n_samples] of every chunk of all codes [n]."""
        offset, hop, mels, waves = 0, HOP, [], []
        pad = -len(self.voice[0]) % HOP
        while True:
            n = hop + pad if offset == 0 else hop
            if len(codes) - offset < n + AHEAD:
                break
            self._add(codes[: offset + n + AHEAD], offset, False, mels, waves)
            offset, hop = offset + n, min(100, 2 * hop)
        self._add(codes, offset, True, mels, waves)
        return mels, waves

    def _add(self, codes: Tensor, offset: int, is_end: bool, mels: list, waves: list) -> None:
        mel = self.flow(codes, *self.voice, streaming=not is_end, finalize=is_end)[:, 2 * offset :]
        mels.append(mel)
        n, place = OVERLAP * 480, 2 * offset * 480
        source = mel.new_zeros(0)
        if self.kept is not None:
            mel, source = torch.cat((self.kept["mel"], mel), 1), self.kept["source"]
            place -= n
        sound, source = self.hift(mel, place, source)
        if self.kept is not None:
            window = torch.hamming_window(2 * n, periodic=False, dtype=torch.float64)
            faded = sound[:n] * window[:n] + self.kept["sound"] * window[n:]
            sound = torch.cat((faded.to(sound.dtype), sound[n:]))
        self.kept = {"mel": mel[:, -OVERLAP:], "source": source[-n:], "sound": sound[-n:]}
        waves.append(sound if is_end else sound[:-n])
