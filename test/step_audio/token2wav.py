"""Step-Audio 2's codes to mel to sound, one call for one stream: a restatement in plain PyTorch,
with tiny random weights under the published names.

Source: stepfun-ai/Step-Audio2 (token2wav.py: set_stream_cache, stream; cosyvoice2/flow/flow.py,
flow_matching.py, decoder_dit.py; cosyvoice2/transformer/upsample_encoder_v2.py). The caches are
written out as there, but those of a stream belong to it, and the noise goes on behind the columns
that are kept. The conformer's layers, its names and HiFT are those of CosyVoice 2.
"""

import math
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_live.models.codecs.flow.mels import seeded_noise
from test.flow.checkpoint import N_CODES, modules
from test.flow.reference import AHEAD, HOP, N_MELS, OVERLAP, Encoder, distances

WIDTH, HEADS, HEAD_DIM, LAYERS, STEPS = 32, 2, 16, 2, 10
# Codes of each voice's recording: of the first fewer columns than the 100 that stay.
PROMPTS = {"ada": 10, "ben": 31, "eve": 60}


class CachedConv(nn.Conv1d):
    def chunk(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: [n, width, n_columns]."""
        n = self.kernel_size[0] - 1
        x = F.pad(x, (n, 0)) if before is None else torch.cat((before, x), 2)
        return self(x), x[..., -n:]


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = (CachedConv(WIDTH, WIDTH, 3) for _ in range(2))
        none = nn.Identity()
        layers = none, first, none, nn.LayerNorm(WIDTH), nn.Mish(), none, second
        self.block = nn.ModuleList(layers)

    def chunk(self, x: Tensor, before) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        one, two = before or (None, None)
        x, one = self.block[1].chunk(x.transpose(1, 2), one)
        x = self.block[4](self.block[3](x.transpose(1, 2)))
        x, two = self.block[6].chunk(x.transpose(1, 2), two)
        return x.transpose(1, 2), (one, two)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        inner = HEADS * HEAD_DIM
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, inner) for _ in "qkv")
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(HEAD_DIM)
        self.proj = nn.Linear(inner, WIDTH)

    def chunk(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part(x).view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        both = torch.cat((self.k_norm(k), v), 3)
        if before is not None:
            both = torch.cat((both, before), 2)
        k, v = both.chunk(2, 3)
        scores = self.q_norm(q) @ k.transpose(2, 3) / math.sqrt(HEAD_DIM)
        return self.proj((scores.softmax(3) @ v).transpose(1, 2).flatten(2)), both


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.conv = Attention(), Conv()
        fc1, fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"fc1": fc1, "fc2": fc2})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 9 * WIDTH))

    def chunk(self, x: Tensor, time: Tensor, columns, keys) -> tuple[Tensor, object, Tensor]:
        parts = self.adaLN_modulation(time).chunk(9, 2)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate, conv_shift, conv_scale, conv_gate = (
            parts
        )
        found, keys = self.attn.chunk(modulated(x, shift, scale), keys)
        x = x + gate * found
        found, columns = self.conv.chunk(modulated(x, conv_shift, conv_scale), columns)
        x = x + conv_gate * found
        inner = F.gelu(self.mlp["fc1"](modulated(x, mlp_shift, mlp_scale)), approximate="tanh")
        return x + mlp_gate * self.mlp["fc2"](inner), columns, keys


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.t_embedder = nn.ModuleDict({"mlp": mlp})
        self.in_proj = nn.Linear(4 * N_MELS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.final_layer = nn.ModuleDict(
            {"adaLN_modulation": modulation, "linear": nn.Linear(WIDTH, N_MELS)}
        )

    def chunk(self, x, mu, t, speaker, cond, caches):
        """x, mu, cond: [2, N_MELS, n]; t: [2]; speaker: [2, N_MELS]. caches: of each block."""
        rates = torch.exp(-math.log(10000) * torch.arange(128) / 128).to(t)
        angles = 1000 * t[:, None] * rates
        waves = torch.cat((angles.cos(), angles.sin()), 1)
        time = self.t_embedder["mlp"](waves)[:, None]
        speaker = speaker[..., None].expand(-1, -1, x.shape[2])
        x = self.in_proj(torch.cat((x, mu, speaker, cond), 1).transpose(1, 2))
        behind = []
        for block, before in zip(self.blocks, caches or [(None, None)] * LAYERS, strict=True):
            x, *cached = block.chunk(x, time, *before)
            behind.append(cached)
        shift, scale = self.final_layer["adaLN_modulation"](time).chunk(2, 2)
        return self.final_layer["linear"](modulated(x, shift, scale)).transpose(1, 2), behind


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_embedding = nn.Embedding(N_CODES, WIDTH)
        self.spk_embed_affine_layer = nn.Linear(192, N_MELS)
        self.encoder = Encoder(WIDTH, n_heads=2, wide=48, n_layers=2, n_up_layers=1)
        self.encoder_proj = nn.Linear(WIDTH, N_MELS)
        self.decoder = nn.ModuleDict({"estimator": DiT()})


class Stream:
    """Of one voice: codes, mel and speaker as `voices` has them. n_seen: columns so far."""

    def __init__(self, flow: Flow, hift: nn.Module, voice: tuple[Tensor, Tensor, Tensor]):
        self.flow, self.hift = flow, hift
        codes, mel, speaker = voice
        self.n_prompt = len(mel)
        self.speaker = flow.spk_embed_affine_layer(F.normalize(speaker, dim=0))
        self.convs: list[Tensor | None] = [None, None]
        self.keys: dict[str, list] = {"encoders": [None] * 2, "up_encoders": [None]}
        self.steps: list = [None] * STEPS
        self.n_seen = 0
        self.dtype = speaker.dtype
        said = self._said(torch.cat((codes, codes[:AHEAD])), last=False)
        self._solve(said, mel.T)
        self.sound = mel.new_zeros(N_MELS, 0), mel.new_zeros(0), mel.new_zeros(0)

    @torch.inference_mode()
    def chunk(self, codes: Tensor, last: bool) -> tuple[Tensor, Tensor]:
        """Mel [N_MELS, n] and sound [n_samples] of codes [n], but the last three if more come."""
        said = self._said(codes, last)
        mel = self._solve(said, torch.zeros(N_MELS, len(said), dtype=self.dtype))
        for step in self.steps:
            for block in step:
                keys = block[1]
                if keys.shape[2] > self.n_prompt + 100:
                    kept = keys[:, :, : self.n_prompt], keys[:, :, -100:]
                    block[1] = torch.cat(kept, 2)
        return mel, self._sound(mel, last)

    def _said(self, codes: Tensor, last: bool) -> Tensor:
        flow = self.flow
        encoder, look = flow.encoder, flow.encoder.pre_lookahead_layer
        x = encoder.embed(flow.input_embedding(codes))
        x = F.pad(x, (0, 0, 0, AHEAD)) if last else x
        y = F.leaky_relu(look["conv1"](x.T[None]))
        y, self.convs[0] = self._convolved(look["conv2"], y, self.convs[0])
        x = self._layers("encoders", y[0].T + x[:-AHEAD])
        doubled = F.interpolate(x.T[None], scale_factor=2.0, mode="nearest")
        y, self.convs[1] = self._convolved(encoder.up_layer["conv"], doubled, self.convs[1])
        x = self._layers("up_encoders", encoder.up_embed(y[0].T))
        return flow.encoder_proj(encoder.after_norm(x))

    @staticmethod
    def _convolved(conv: nn.Conv1d, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        n = conv.kernel_size[0] - 1
        x = F.pad(x, (n, 0)) if before is None else torch.cat((before, x), 2)
        return conv(x), x[..., -n:]

    def _layers(self, name: str, x: Tensor) -> Tensor:
        for i, layer in enumerate(getattr(self.flow.encoder, name)):
            attention = layer.self_attn
            known = self.keys[name][i]
            normed = layer.norm_mha(x)
            q, k, v = (
                getattr(attention, f"linear_{part}")(normed).view(len(x), attention.n_heads, -1)
                for part in "qkv"
            )
            if known is not None:
                k, v = torch.cat((known[0], k)), torch.cat((known[1], v))
            self.keys[name][i] = k, v
            n_keys, before = len(k), len(k) - len(x)
            table = distances(n_keys, WIDTH, x.dtype)
            places = attention.linear_pos(table).view(2 * n_keys - 1, attention.n_heads, -1)
            at, of = torch.arange(len(x))[:, None] + before, torch.arange(n_keys)[None]
            found = torch.empty_like(q)
            for h in range(attention.n_heads):
                content = (q[:, h] + attention.pos_bias_u[h]) @ k[:, h].T
                by_distance = (q[:, h] + attention.pos_bias_v[h]) @ places[:, h].T
                rows = torch.arange(len(x))[:, None]
                scores = content + by_distance[rows, n_keys - 1 + at - of]
                found[:, h] = (scores / math.sqrt(q.shape[2])).softmax(1) @ v[:, h]
            x = x + attention.linear_out(found.flatten(1))
            inner = F.silu(layer.feed_forward["w_1"](layer.norm_ff(x)))
            x = x + layer.feed_forward["w_2"](inner)
        return x

    def _solve(self, said: Tensor, cond: Tensor) -> Tensor:
        mu, cond = said.T[None], cond[None]
        noise = seeded_noise(N_MELS).to(said)[self.n_seen : self.n_seen + len(said)]
        self.n_seen += len(said)
        x, speaker = noise.T[None], self.speaker[None]
        ends = 1 - torch.cos(torch.linspace(0, 1, STEPS + 1, dtype=mu.dtype) * 0.5 * torch.pi)
        t, length = ends[0], ends[1] - ends[0]
        for step in range(1, STEPS + 1):
            moved, self.steps[step - 1] = self.flow.decoder["estimator"].chunk(
                x.repeat(2, 1, 1),
                torch.cat((mu, torch.zeros_like(mu))),
                t.expand(2),
                torch.cat((speaker, torch.zeros_like(speaker))),
                torch.cat((cond, torch.zeros_like(cond))),
                self.steps[step - 1],
            )
            guided, free = moved.chunk(2)
            x = x + length * (1.7 * guided - 0.7 * free)
            t = t + length
            if step < STEPS:
                length = ends[step + 1] - t
        return x[0]

    def _sound(self, mel: Tensor, last: bool) -> Tensor:
        old_mel, old_source, old_sound = self.sound
        place = 480 * ((self.n_seen - mel.shape[1] - self.n_prompt) - old_mel.shape[1])
        mel = torch.cat((old_mel, mel), 1)
        sound, source = self.hift(mel, place, old_source)
        n = 480 * OVERLAP
        if len(old_sound):
            window = torch.hamming_window(2 * n, periodic=False, dtype=torch.float64).to(mel)
            sound = torch.cat((sound[:n] * window[:n] + old_sound * window[n:], sound[n:]))
        self.sound = mel[:, -OVERLAP:], source[-n:], sound[-n:]
        return sound if last else sound[:-n]

    def run(self, codes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Mel and sound of each chunk of codes [n], as the published loop cuts them."""
        mels, waves = [], []
        while len(codes) >= HOP + AHEAD:
            mel, wave = self.chunk(codes[: HOP + AHEAD], last=False)
            mels.append(mel)
            waves.append(wave)
            codes = codes[HOP:]
        if len(codes):
            mel, wave = self.chunk(codes, last=True)
            mels.append(mel)
            waves.append(wave)
        return mels, waves


@cache
def weights() -> tuple[Flow, nn.Module]:
    """Flow and HiFT in float32; with large enough weights that each layer matters."""
    torch.manual_seed(2)
    flow = Flow().eval()
    with torch.no_grad():
        for name, weight in flow.named_parameters():
            if weight.ndim > 1 and "input_embedding" not in name:
                weight *= 1.5
    return flow, modules(2)[1]


@cache
def voices() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Codes [n], mel [2 * n, N_MELS] and speaker [192] of each voice."""
    seeded = torch.Generator().manual_seed(4)
    return {
        name: (
            torch.randint(0, N_CODES, (n,), generator=seeded),
            torch.randn(2 * n, N_MELS, generator=seeded),
            torch.randn(192, generator=seeded),
        )
        for name, n in PROMPTS.items()
    }


def save(path: Path) -> None:
    """The checkpoint's folder token2wav."""
    flow, hift = weights()
    path.mkdir(parents=True, exist_ok=True)
    torch.save(flow.state_dict(), path / "flow.pt")
    stored = {f"generator.{name}": value for name, value in hift.state_dict().items()}
    torch.save(stored, path / "hift.pt")
    known = {
        name: {
            "flow_prompt_speech_token": codes[None].int(),
            "prompt_speech_feat": mel[None],
            "flow_embedding": speaker[None],
        }
        for name, (codes, mel, speaker) in voices().items()
    }
    torch.save(known, path / "spk2info.pt")


@torch.inference_mode()
def stream(voice: str, dtype: torch.dtype) -> Stream:
    codes, *others = voices()[voice]
    flow, hift = (module.to(dtype) for module in weights())
    return Stream(flow, hift, (codes, *(part.to(dtype) for part in others)))
