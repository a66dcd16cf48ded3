"""The vocoder's training: transformers' Code2Wav decodes codes into the recordings."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from training.demo.codes import Codebooks, log_mel
from training.demo.schedule import Log, ResumableSteps, cosine, step_generator
from training.demo.sizes import FRAME_SAMPLES

_WINDOWS = (256, 512, 1024, 2048)
_CROP_FRAMES = 12
# A crop's first frame and last samples are not in the loss: they lack the frames around them.
_UNJUDGED = FRAME_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings:
    steps: int = 5000
    batch: int = 8
    learning_rate: float = 2e-3
    waveform_weight: float = 1.0
    seed: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """sound: [frames * 1920] at 24 kHz; codes: [16, frames]."""

    sound: torch.Tensor
    codes: torch.Tensor


def train_codec(
    config,
    codebooks: Codebooks,
    recordings: list[Recording],
    settings: CodecSettings,
    log: Log,
    resumable: ResumableSteps,
) -> Qwen3OmniMoeCode2Wav:
    """Train the vocoder on crops: recordings are drawn by length, crops uniformly in them."""
    torch.manual_seed(settings.seed)
    codec = Qwen3OmniMoeCode2Wav._from_config(config).float()
    _initialise(codec, codebooks)
    optimiser = torch.optim.AdamW(
        codec.parameters(), settings.learning_rate, betas=(0.8, 0.95), weight_decay=1e-3
    )
    fitting = [r for r in recordings if r.codes.shape[1] >= _CROP_FRAMES]
    weights = torch.tensor([float(r.codes.shape[1]) for r in fitting])
    for step in resumable.steps(settings.steps, codec, optimiser):
        choose = step_generator(settings.seed, step)
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * cosine(step, settings.steps, warm_up=50)
        codes, sound = _crops(fitting, weights, settings.batch, choose)
        made = codec(codes)[:, 0]
        sound = sound[:, : made.shape[1]]
        made, sound = made[:, _UNJUDGED:], sound[:, _UNJUDGED:]
        spectral = spectral_distance(made, sound)
        waveform = (made - sound).norm() / (sound.norm() + 1e-3)
        (spectral + settings.waveform_weight * waveform).backward()
        nn.utils.clip_grad_norm_(codec.parameters(), 3.0)
        optimiser.step()
        optimiser.zero_grad()
        log(step, spectral=spectral, waveform=waveform)
    return codec.eval()


@torch.no_grad()
def mel_error(codec: Qwen3OmniMoeCode2Wav, recordings: list[Recording]) -> float:
    """Mean absolute difference of natural log-mel magnitudes."""
    errors = []
    for recording in recordings:
        made = codec(recording.codes[None])[0, 0]
        made = functional.pad(made, (0, len(recording.sound) - len(made)))
        errors.append((log_mel(made) - log_mel(recording.sound)).abs().mean().item())
    return sum(errors) / len(errors)


def spectral_distance(made: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    """Multi-resolution STFT distance of [batch, samples]: convergence and log magnitude."""
    total = torch.zeros(())
    for size in _WINDOWS:
        window = torch.hann_window(size)
        a, b = (
            torch.stft(x, size, size // 4, window=window, center=False, return_complex=True)
            for x in (made, meant)
        )
        a = (a.real.square() + a.imag.square() + 1e-7).sqrt()
        b = (b.real.square() + b.imag.square() + 1e-7).sqrt()
        floor = 2e-2 * math.sqrt(size) / 16
        convergence = (a - b).norm() / (b.norm() + 1e-3)
        total = total + convergence + (torch.log(a + floor) - torch.log(b + floor)).abs().mean()
    return total / len(_WINDOWS)


def _crops(
    recordings: list[Recording], weights: torch.Tensor, n: int, choose: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, sound = [], []
    for i in torch.multinomial(weights, n, replacement=True, generator=choose).tolist():
        recording = recordings[i]
        room = recording.codes.shape[1] - _CROP_FRAMES + 1
        at = int(torch.randint(room, (), generator=choose))
        codes.append(recording.codes[:, at : at + _CROP_FRAMES])
        sound.append(recording.sound[at * FRAME_SAMPLES : (at + _CROP_FRAMES) * FRAME_SAMPLES])
    return torch.stack(codes), torch.stack(sound)


@torch.no_grad()
def _initialise(codec: Qwen3OmniMoeCode2Wav, codebooks: Codebooks) -> None:
    """Set centroids as embedding, and convolutions that preserve the signal's level."""
    codec.code_embedding.weight.copy_(codebooks.embedding())
    codec.code_embedding.weight.requires_grad_(False)
    for module in codec.modules():
        if isinstance(module, nn.Conv1d):
            fan_in = module.weight.shape[1] * module.kernel_size[0]
        elif isinstance(module, nn.ConvTranspose1d):
            fan_in = module.in_channels * module.kernel_size[0] / module.stride[0]
        else:
            continue
        nn.init.normal_(module.weight, 0.0, 0.8 / math.sqrt(fan_in))
        nn.init.zeros_(module.bias)
    for name, weight in codec.named_parameters():
        if name.endswith("gamma"):
            weight.fill_(0.3)
    codec.decoder[-1].conv.weight.mul_(0.2)
