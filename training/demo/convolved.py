"""Outputs of the audio encoder's convolutions: computed once, then trained on in many steps.

The convolutions are trained first and then frozen. Each recording goes through them a few times,
with another distortion each time. Training the layers behind them then costs a third of the whole
encoder's cost.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from training.demo.distortion import Distortion
from training.demo.hearing import Heard, n_places
from training.demo.schedule import step_generator

_AT_ONCE = 2
_CLIPS_TOGETHER = 32


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedClip:
    """One recording, convolved.

    text: what is said in it; empty for noise.
    rows: [places, width] half, inputs of the encoder's first layer.
    """

    text: str
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedClips:
    """Convolved clips in one tensor.

    texts: what is said in each clip; empty for noise.
    rows: [places of all, width] half, clips concatenated.
    ends: [n] end of each clip in rows.
    """

    texts: list[str]
    rows: torch.Tensor
    ends: torch.Tensor

    def __iter__(self) -> Iterator[ConvolvedClip]:
        begin = 0
        for text, end in zip(self.texts, self.ends.tolist(), strict=True):
            yield ConvolvedClip(text, self.rows[begin:end])
            begin = end


def convolve_clips(
    tower: Qwen3OmniMoeAudioEncoder,
    heard: list[Heard],
    times: int,
    distortion: Distortion,
    seed: int,
) -> ConvolvedClips:
    """Convolve each recording `times` times: once undistorted, then with different distortions."""
    jobs = [(i, time) for i in range(len(heard)) for time in range(times)]

    @torch.no_grad()  # on the inner function: the setting is per thread
    def made(together: list[tuple[int, int]]) -> list[torch.Tensor]:
        mels = []
        for i, time in together:
            mel = heard[i].mel
            mels.append(
                distortion.apply(mel, step_generator(seed + time, i)) if time else mel.float()
            )
        return [rows.half() for rows in convolve(tower, mels)]

    batches = [jobs[i : i + _CLIPS_TOGETHER] for i in range(0, len(jobs), _CLIPS_TOGETHER)]
    initializer = torch.set_num_threads
    with ThreadPoolExecutor(_AT_ONCE, initializer=initializer, initargs=(1,)) as pool:
        rows = [one for batch in pool.map(made, batches) for one in batch]
    ends = torch.tensor([len(one) for one in rows]).cumsum(0)
    return ConvolvedClips([heard[i].text for i, _ in jobs], torch.cat(rows), ends)


def convolve(tower: Qwen3OmniMoeAudioEncoder, clips: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convolve mels [128, frames] to inputs [places, width] of the first layer.

    One-second pieces are convolved separately, each with its own positions.
    """
    width = 2 * tower.n_window
    pieces = [piece for clip in clips for piece in clip.split(width, dim=1)]
    padded = torch.stack([functional.pad(piece, (0, width - piece.shape[1])) for piece in pieces])
    x = padded[:, None]
    for convolve in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
        x = functional.gelu(convolve(x))
    x = tower.conv_out(x.permute(0, 3, 1, 2).flatten(2))
    x = x + tower.positional_embedding.positional_embedding[: x.shape[1]]
    of_pieces = n_places(torch.tensor([piece.shape[1] for piece in pieces])).tolist()
    rows = torch.cat([piece[:n] for piece, n in zip(x, of_pieces, strict=True)])
    return list(rows.split(n_places(torch.tensor([clip.shape[1] for clip in clips])).tolist()))


def encode_convolved(
    tower: Qwen3OmniMoeAudioEncoder, rows: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Run the rest of the encoder on convolved clips.

    Args:
        rows: [places, width] of each clip.
    Returns:
        [places, hidden] of each clip.
    """
    pieces_seen = tower.n_window_infer // (2 * tower.n_window)
    seen = pieces_seen * int(n_places(torch.tensor(2 * tower.n_window)))
    lengths = [0]
    for one in rows:
        lengths += [len(part) for part in one.split(seen)]
    ends = torch.tensor(lengths).cumsum(0, dtype=torch.int32)
    x = torch.cat(rows)
    for layer in tower.layers:
        (x,) = layer(x, ends)
    x = tower.proj2(tower.act(tower.proj1(tower.ln_post(x))))
    return list(x.split([len(one) for one in rows]))


def layers_of(tower: Qwen3OmniMoeAudioEncoder) -> list[torch.nn.Parameter]:
    """Parameters that `encode_convolved` uses."""
    parts = (tower.layers, tower.ln_post, tower.proj1, tower.proj2)
    return [parameter for part in parts for parameter in part.parameters()]


def join_clips(heard: list[Heard], n: int, most: int, seed: int) -> list[Heard]:
    """n clips of 2 to `most` recordings in a row, as of a speaker who continues to talk."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        some = [rng.choice(heard) for _ in range(rng.randint(2, most))]
        text = " ".join(one.text for one in some if one.text)
        made.append(Heard(text, torch.cat([one.mel for one in some], dim=1)))
    return made
