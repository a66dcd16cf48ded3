"""The thinker's training: conversations in, the next answer out.

Speech is also spelt, from the audio encoder's outputs and once more from the thinker's middle
layer, where a word that the encoder's one-second pieces split is whole again.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from training.demo.conversations import IGNORED, Conversation, Style, Writer
from training.demo.convolved import encode_convolved, layers_of
from training.demo.hearing import Spelling
from training.demo.schedule import Log, ResumableSteps, Shares, cosine
from training.demo.talker import initialise

_TOGETHER = 2  # conversations in one pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerSettings:
    steps: int = 8000
    batch: int = 16  # conversations
    learning_rate: float = 1.2e-3
    tower_rate: float = 0.5  # of the learning rate, for the audio encoder
    style: Style = field(default_factory=Style)
    spelling: float = 0.3  # weight of the spelling loss of the audio encoder
    spelling_layer: int = 2  # the thinker's layer after which its hidden states are spelt too
    doubt: float = 0.6  # see `answering_loss`
    sure_until: float = 0.4  # share of the steps that are trained without doubt
    seed: int = 4


def train_thinker(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    writers: list[Writer],
    settings: ThinkerSettings,
    log: Log,
    resumable: ResumableSteps,
) -> None:
    """Train the thinker on conversations.

    The audio encoder is trained before: here its layers train at a lower rate, and its
    convolutions are frozen. Token embeddings are frozen too.

    writers: one per share of a batch.
    """
    torch.manual_seed(settings.seed)
    stack = thinker.model
    _initialise(thinker)
    stack.embed_tokens.weight.requires_grad_(False)
    language = [p for p in (*stack.parameters(), *thinker.lm_head.parameters()) if p.requires_grad]
    tower = layers_of(thinker.audio_tower)
    rates = (1.0, settings.tower_rate)
    groups = [{"params": language}, {"params": tower}]
    optimiser = torch.optim.AdamW(groups, settings.learning_rate, betas=(0.9, 0.98))
    shares, spelling = Shares(), Spelling.of(writers[0].all_spellings(), stack.embed_tokens)
    for step in resumable.steps(settings.steps, thinker, optimiser):
        now = settings.learning_rate * cosine(step, settings.steps, warm_up=300)
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = now * rate
        doubt = settings.doubt if step >= settings.sure_until * settings.steps else 0.0

        def loss_of(
            share: int, step: int = step, doubt: float = doubt
        ) -> tuple[torch.Tensor, torch.Tensor]:
            writer = writers[share]
            writer.begin(step)
            batch = [writer.conversation() for _ in range(settings.batch // shares.N)]
            found = read_apart(thinker, batch, settings.spelling_layer)
            loss = answering_loss(
                found.logits, found.labels, found.decides, writer.unknown_id, doubt
            )
            if found.heard:
                words = [writer.spelling(text) for text in found.said]
                for rows in (found.heard, found.spelt):
                    loss = loss + settings.spelling * spelling.loss(rows, words)
            right = found.logits.argmax(-1) == found.labels
            decided = right[found.decides] if found.decides.any() else right
            return loss, decided.float().mean()

        loss, right = shares.gradients([*language, *tower], loss_of)
        nn.utils.clip_grad_norm_([*language, *tower], 1.0)
        optimiser.step()
        log(step, loss=loss, decided=right)


def _initialise(thinker: Qwen3OmniMoeThinkerForConditionalGeneration) -> None:
    embed_tokens = thinker.model.embed_tokens
    embedding = embed_tokens.weight.detach().clone()
    initialise(thinker.model)
    nn.init.normal_(thinker.lm_head.weight, 0.0, 0.02)
    with torch.no_grad():
        embed_tokens.weight.copy_(embedding)


def answering_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    decides: torch.Tensor,
    unknown_id: int,
    doubt: float,
) -> torch.Tensor:
    """Cross entropy; where a response begins, UNKNOWN counts as right by the share `doubt`.

    Where the best answer's probability is below `doubt`, UNKNOWN then has the lowest loss ("Deep
    Gamblers", Liu et al. 2019, eq. 5, with doubt = 1 / o).
    """
    log_p = logits.log_softmax(-1)
    right = log_p.gather(-1, labels[:, None])[:, 0]
    if doubt:
        passed = log_p[:, unknown_id] + math.log(doubt)
        right = torch.where(decides, torch.logaddexp(right, passed), right)
    return -right.mean()


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """The thinker's outputs for a batch.

    logits: [n, vocabulary] of all tokens with a label, concatenated.
    labels: [n].
    decides: [n] bool, whether the token is a decision.
    said: text of each clip.
    heard: [places, hidden] of each clip, outputs of the audio encoder.
    spelt: [places, hidden] of each clip, hidden states after `spelling_layer`.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    decides: torch.Tensor
    said: list[str]
    heard: list[torch.Tensor]
    spelt: list[torch.Tensor]


def read_apart(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    batch: list[Conversation],
    spelling_layer: int,
) -> Read:
    """Read conversations in groups of similar length, which need less padding."""
    batch = sorted(batch, key=lambda conversation: len(conversation.token_ids))
    parts = [
        read(thinker, batch[i : i + _TOGETHER], spelling_layer)
        for i in range(0, len(batch), _TOGETHER)
    ]
    return Read(
        logits=torch.cat([part.logits for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        decides=torch.cat([part.decides for part in parts]),
        said=[text for part in parts for text in part.said],
        heard=[rows for part in parts for rows in part.heard],
        spelt=[rows for part in parts for rows in part.spelt],
    )


def read(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    batch: list[Conversation],
    spelling_layer: int,
) -> Read:
    ids = _padded([c.token_ids for c in batch], 0)
    labels = _padded([c.labels for c in batch], IGNORED)[:, 1:]
    decides = torch.zeros_like(ids, dtype=torch.bool)
    for row, conversation in zip(decides, batch, strict=True):
        row[conversation.decisions] = True
    clips = [clip for c in batch for clip in c.clips]
    heard = encode_convolved(thinker.audio_tower, [clip.rows for clip in clips]) if clips else []
    rows, is_sound = thinker.model.embed_tokens(ids), ids == thinker.config.audio_token_id
    if heard:
        rows = rows.masked_scatter(is_sound[..., None], torch.cat(heard))
    out = thinker.model(inputs_embeds=rows, use_cache=False, output_hidden_states=True)
    learned = labels != IGNORED
    return Read(
        logits=thinker.lm_head(out.last_hidden_state[:, :-1][learned]),
        labels=labels[learned],
        decides=decides[:, 1:][learned],
        said=[clip.text for clip in clips],
        heard=heard,
        spelt=list(out.hidden_states[spelling_layer][is_sound].split(list(map(len, heard)))),
    )


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
