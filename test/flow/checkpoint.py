"""Tiny random decoders of CosyVoice 2 and 3 in the published files, and their reference."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sglang_live.models.codecs.snac import NOISE_SIZE, noise_table
from test.flow import reference3, reference_s3gen
from test.flow.reference import N_MELS, Encoder, Estimator, Flow, Hift, Stream

N_CODES, WIDTH = 6561, 32
# Codes of each voice's recording: the first chunk ends where they are a multiple of 25.
PROMPTS = {"ada": 10, "ben": 31, "eve": 50}
HARMONICS = 9


def noise_at(place: int, n: int) -> Tensor:
    """[n, HARMONICS], what the product takes for the source's noise from a place on."""
    places = torch.arange(place, place + n)[:, None]
    shifts = torch.arange(HARMONICS) * (NOISE_SIZE // HARMONICS)
    table = noise_table(torch.device("cpu"), torch.float32)
    return table[(places + shifts) & (NOISE_SIZE - 1)]


def uniform_at(place: int, n: int) -> Tensor:
    """As noise_at, of CosyVoice 3."""
    places = torch.arange(place, place + n)[:, None]
    shifts = torch.arange(HARMONICS) * (NOISE_SIZE // HARMONICS)
    table = torch.rand(NOISE_SIZE, generator=torch.Generator().manual_seed(0))
    return table[(places + shifts) & (NOISE_SIZE - 1)]


@cache
def modules(version: int) -> tuple[nn.Module, nn.Module]:
    """Flow and HiFT in float32; with large enough weights that each layer matters."""
    torch.manual_seed(version)
    if version == 2:
        encoder = Encoder(WIDTH, n_heads=2, wide=48, n_layers=1, n_up_layers=1)
        estimator = Estimator(WIDTH, n_heads=2, head_dim=64, n_layers=1, n_mid=1)
        flow = Flow(N_CODES, WIDTH, encoder, estimator).eval()
    else:
        dit = reference3.DiT(WIDTH, n_heads=2, head_dim=64, n_layers=2)
        flow = reference3.Flow(N_CODES, n_look=48, estimator=dit).eval()
    torch.manual_seed(10 + version)
    if version == 2:
        hift = Hift(16, n_pitch=8, noise=noise_at).eval()
    else:
        hift = reference3.Hift(16, n_pitch=8, noise=uniform_at).eval()
    _enlarge(flow, hift)
    return flow, hift


def _enlarge(flow: nn.Module, hift: nn.Module) -> None:
    with torch.no_grad():
        for name, weight in flow.named_parameters():
            if weight.ndim > 1 and "input_embedding" not in name:
                weight *= 1.5
        # In Hz: some columns have a voice, others none.
        hift.f0_predictor["classifier"].weight *= 400.0
        hift.conv_post.parametrizations.weight.original0 *= 2.0


@cache
def s3gen(is_mean: bool) -> reference_s3gen.S3Gen:
    """Chatterbox's, or Turbo's."""
    torch.manual_seed(4 + is_mean)
    sizes = {"n_heads": 2, "head_dim": 64, "n_layers": 1, "n_mid": 1}
    encoder = Encoder(WIDTH, n_heads=2, wide=48, n_layers=1, n_up_layers=1)
    if is_mean:
        estimator = reference_s3gen.MeanEstimator(WIDTH, **sizes)
        flow = reference_s3gen.MeanFlow(N_CODES, WIDTH, encoder, estimator)
    else:
        flow = Flow(N_CODES, WIDTH, encoder, Estimator(WIDTH, **sizes))
    seeded = torch.Generator().manual_seed(0)
    phases = torch.pi * (2 * torch.rand(HARMONICS, generator=seeded) - 1)
    phases[0] = 0
    torch.manual_seed(14)
    hift = reference_s3gen.Hift(16, n_pitch=8, noise=noise_at, phases=phases)
    _enlarge(flow, hift)
    return reference_s3gen.S3Gen(flow, hift).eval()


def save_s3gen(path: Path, is_mean: bool) -> None:
    """Voices are "default", and "ben", whose recording has a column of mel more than codes."""
    file = "s3gen_meanflow.safetensors" if is_mean else "s3gen.safetensors"
    left_out = {"tokenizer.window": torch.zeros(4)}  # that makes codes of recordings
    save_file(s3gen(is_mean).state_dict() | left_out, path / file)
    (path / "voices").mkdir()
    for name in s3gen_voices():
        place = path / ("conds.pt" if name == "default" else f"voices/{name}.pt")
        torch.save({"t3": {}, "gen": s3gen_known(name)}, place)


def s3gen_known(name: str) -> dict[str, Tensor | None]:
    """A voice as Chatterbox writes it."""
    codes, mel, speaker = s3gen_voices()[name]
    return {
        "prompt_token": codes[None],
        "prompt_token_len": torch.tensor([len(codes)]),
        "prompt_feat": mel[None],
        "prompt_feat_len": None,
        "embedding": speaker[None],
    }


def s3gen_voices() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    codes, mel, speaker = voices()["ben"]
    return {"default": voices()["ada"], "ben": (codes, torch.cat((mel, mel[:1])), speaker)}


@cache
def voices() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Codes [n], mel [2 * n, N_MELS] and speaker [192] of each voice."""
    seeded = torch.Generator().manual_seed(3)
    return {
        name: (
            torch.randint(0, N_CODES, (n,), generator=seeded),
            torch.randn(2 * n, N_MELS, generator=seeded),
            torch.randn(192, generator=seeded),
        )
        for name, n in PROMPTS.items()
    }


def save(path: Path, version: int) -> None:
    save_weights(path, version)
    known = {
        name: {
            "flow_prompt_speech_token": codes[None].int(),
            "prompt_speech_feat": mel[None],
            "flow_embedding": speaker[None],
        }
        for name, (codes, mel, speaker) in voices().items()
    }
    torch.save(known, path / "spk2info.pt")


def save_weights(path: Path, version: int) -> None:
    flow, hift = modules(version)
    torch.save(flow.state_dict(), path / "flow.pt")
    stored = {f"generator.{name}": value for name, value in hift.state_dict().items()}
    torch.save(stored, path / "hift.pt")


def random_codes(n: int, seed: int) -> Tensor:
    """[n] int64."""
    return torch.randint(0, N_CODES, (n,), generator=torch.Generator().manual_seed(seed))


def reference(
    version: int, voice: str, codes: Tensor, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Mel [N_MELS, n_columns] and sound [n_samples] of each chunk of codes [n]."""
    known, *others = voices()[voice]
    flow, hift = (module.to(dtype) for module in modules(version))
    stream = Stream if version == 2 else reference3.Stream
    try:
        return stream(flow, hift, (known, *(part.to(dtype) for part in others))).run(codes)
    finally:
        flow.float(), hift.float()
