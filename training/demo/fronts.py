"""What the audio encoder's convolutions make of recordings: computed once, learned from often.

The convolutions learn first and then stay as they are. Every recording goes through them a few
times, distorted anew each time; the layers behind them, which have the most to learn, then cost a
third of what the whole encoder would.
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
from training.demo.schedule import drawing

_AT_ONCE = 2
_CLIPS_TOGETHER = 32


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """text: what was said, empty for noise; rows: [places, width] half, as they enter the
    encoder's first layer."""

    text: str
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Fronts:
    """Of every recording so many.

    rows: [places of all, width] half, one front after the other; ends: where each ends.
    """

    texts: list[str]
    rows: torch.Tensor
    ends: torch.Tensor

    def __iter__(self) -> Iterator[Front]:
        begin = 0
        for text, end in zip(self.texts, self.ends.tolist(), strict=True):
            yield Front(text, self.rows[begin:end])
            begin = end


def fronts_of(
    tower: Qwen3OmniMoeAudioEncoder,
    heard: list[Heard],
    times: int,
    distortion: Distortion,
    seed: int,
) -> Fronts:
    """Each recording so many times, distorted differently; the first time not at all."""
    jobs = [(i, time) for i in range(len(heard)) for time in range(times)]

    @torch.no_grad()  # here, because each thread has its own
    def made(together: list[tuple[int, int]]) -> list[torch.Tensor]:
        mels = []
        for i, time in together:
            mel = heard[i].mel
            mels.append(distortion.apply(mel, drawing(seed + time, i)) if time else mel.float())
        return [rows.half() for rows in front(tower, mels)]

    batches = [jobs[i : i + _CLIPS_TOGETHER] for i in range(0, len(jobs), _CLIPS_TOGETHER)]
    initializer = torch.set_num_threads
    with ThreadPoolExecutor(_AT_ONCE, initializer=initializer, initargs=(1,)) as pool:
        rows = [one for batch in pool.map(made, batches) for one in batch]
    ends = torch.tensor([len(one) for one in rows]).cumsum(0)
    return Fronts([heard[i].text for i, _ in jobs], torch.cat(rows), ends)


def front(tower: Qwen3OmniMoeAudioEncoder, clips: list[torch.Tensor]) -> list[torch.Tensor]:
    """Mel [128, frames] each in; [places, width] each out, as they enter the first layer.

    Pieces of a second go through the convolutions apart, each with positions of its own.
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


def listen(tower: Qwen3OmniMoeAudioEncoder, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rest of the encoder: [places, width] each in, [places, hidden] each out."""
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
    """Parameters of what `listen` runs through."""
    parts = (tower.layers, tower.ln_post, tower.proj1, tower.proj2)
    return [parameter for part in parts for parameter in part.parameters()]


def joined(heard: list[Heard], n: int, most: int, seed: int) -> list[Heard]:
    """So many of several recordings each, one after the other, as by one who goes on talking."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        some = [rng.choice(heard) for _ in range(rng.randint(2, most))]
        text = " ".join(one.text for one in some if one.text)
        made.append(Heard(text, torch.cat([one.mel for one in some], dim=1)))
    return made
