"""The audio encoder's training: CTC against the thinker's own token embeddings.

The encoder's output for a spoken word then resembles the embedding of the typed word, at the frames
where it is said, so that the thinker has only to learn the answers.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    _get_feat_extract_output_lengths,
)

from training.demo.acoustics import Room
from training.demo.distortion import EXTRACTOR, WILD, Distortion
from training.demo.recordings import Utterance
from training.demo.schedule import Log, ResumableSteps, Shares, cosine, step_generator
from training.demo.voices import QUESTION_RATE_HZ

# A token that is in no text (`<|endoftext|>`): CTC's blank.
BLANK_ID = 0
_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HearingSettings:
    steps: int = 20_000
    batch: int = 48
    learning_rate: float = 2e-3
    distortion: Distortion = WILD
    calm: int = 8_000  # steps over which the distortion grows to its full strength
    seed: int = 3


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """A recording's features.

    text: what is said in it; empty for noise.
    mel: [128, frames] half, as the thinker gets it.
    """

    text: str
    mel: torch.Tensor


def features(sound: np.ndarray) -> torch.Tensor:
    """Mel features [128, frames] of float32 samples at 16 kHz, as the server computes them."""
    made = EXTRACTOR(
        sound,
        sampling_rate=QUESTION_RATE_HZ,
        padding="longest",
        truncation=False,
        return_tensors="pt",
    )
    return made.input_features[0]


def heard_in_rooms(said: list[Utterance], seed: int, snr_db: float | None = None) -> list[Heard]:
    """Features of each recording, in a random room of its own."""

    def heard(number: int) -> Heard:
        rng = np.random.default_rng([seed, number])
        sound = Room.random(rng, snr_db).apply(said[number].sound, rng)
        return Heard(said[number].text, features(sound).half())

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(heard, range(len(said))))


def encode(tower: Qwen3OmniMoeAudioEncoder, clips: list[torch.Tensor]) -> list[torch.Tensor]:
    """Encode mels [128, frames] to [places, hidden], 12.5 places per second."""
    lengths = torch.tensor([clip.shape[1] for clip in clips])
    out = tower(torch.cat(clips, dim=1), feature_lens=lengths).last_hidden_state
    return list(out.split(n_places(lengths).tolist()))


def n_places(n_frames: torch.Tensor) -> torch.Tensor:
    return _get_feat_extract_output_lengths(n_frames)


def train_hearing(
    tower: Qwen3OmniMoeAudioEncoder,
    embed_tokens: nn.Embedding,
    encode_text,
    heard: list[Heard],
    settings: HearingSettings,
    log: Log,
    resumable: ResumableSteps,
) -> None:
    """Train the audio encoder to spell.

    encode_text: text -> token ids, of lower case words with a space before each.
    """
    torch.manual_seed(settings.seed)
    _initialise(tower)
    parameters = list(tower.parameters())
    optimiser = torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=0.01)
    said = [torch.tensor(encode_text(h.text), dtype=torch.long) for h in heard]
    spelling = Spelling.of(said, embed_tokens)
    shares = Shares()
    for step in resumable.steps(settings.steps, tower, optimiser):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * cosine(step, settings.steps, warm_up=300)
        distortion = settings.distortion.faded(min(1.0, step / settings.calm))

        def loss_of(
            share: int, step: int = step, distortion: Distortion = distortion
        ) -> tuple[torch.Tensor, torch.Tensor]:
            choose = step_generator(settings.seed + share, step)
            n = settings.batch // shares.N
            some = torch.randint(len(heard), (n,), generator=choose).tolist()
            rows = encode(tower, [distortion.apply(heard[i].mel, choose) for i in some])
            right = [
                spelling.spell(row.detach()) == said[i].tolist()
                for row, i in zip(rows, some, strict=True)
            ]
            loss = spelling.loss(rows, [said[i] for i in some])
            return loss, torch.tensor(right).float().mean()

        loss, right = shares.gradients(parameters, loss_of)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        log(step, ctc=loss, right=right)


@dataclass(frozen=True, slots=True, eq=False)
class Spelling:
    """The words that an encoder's outputs are classified into.

    token_ids: [n], the blank first.
    directions: [n, hidden], their frozen token embeddings.
    """

    token_ids: torch.Tensor
    directions: torch.Tensor

    @classmethod
    def of(cls, said: list[torch.Tensor], embed_tokens: nn.Embedding) -> "Spelling":
        """The words of all recordings; other tokens are no classes."""
        token_ids = torch.cat([torch.tensor([BLANK_ID]), *said]).unique()
        assert token_ids[0] == BLANK_ID
        return cls(token_ids, embed_tokens.weight.detach()[token_ids])

    def loss(self, rows: list[torch.Tensor], said: list[torch.Tensor]) -> torch.Tensor:
        """CTC loss of an encoder's outputs [places, hidden] against the clips' token ids."""
        logits = nn.utils.rnn.pad_sequence(rows) @ self.directions.T
        return functional.ctc_loss(
            logits.log_softmax(-1),
            torch.searchsorted(self.token_ids, torch.cat(said)),
            torch.tensor([len(row) for row in rows]),
            torch.tensor([len(ids) for ids in said]),
            blank=0,
            zero_infinity=True,
        )

    def spell(self, row: torch.Tensor) -> list[int]:
        """Token ids of an output [places, hidden], decoded greedily."""
        path = torch.unique_consecutive((row @ self.directions.T).argmax(-1))
        return self.token_ids[path[path != 0]].tolist()


@torch.no_grad()
def _initialise(tower: Qwen3OmniMoeAudioEncoder) -> None:
    for module in tower.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            gain = 1.4 if isinstance(module, nn.Conv2d) else 1.0
            nn.init.normal_(module.weight, 0.0, gain * fan_in**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
