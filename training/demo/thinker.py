"""The thinker: conversations in, the next answer out.

Conversations look as the server writes them: instructions of any kind, several turns, typed or
spoken, replies that were cut off where somebody interrupted. A question may come with the request
to write down what was said instead of answering.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from training.demo import world
from training.demo.distortion import WILD, Distortion
from training.demo.hearing import Heard, encode, n_places, spelling_loss
from training.demo.schedule import Course, Log, Shares, cosine, drawing
from training.demo.strangers import strangers
from training.demo.talker import initialise

TRANSCRIBE = "Transcribe the audio into text."
_AUDIO = "<|audio_start|><|audio_pad|><|audio_end|>"
_IGNORED = -100
_MAX_TURNS = 8
_INSTRUCTIONS = (
    "You are a helpful assistant.",
    "You are a helpful voice assistant. Answer in one or two short sentences.",
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of "
    "perceiving auditory and visual inputs, as well as generating text and speech.",
    "Be brief.",
    "Answer in a friendly way.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkerSettings:
    steps: int = 8000
    batch: int = 16  # conversations
    learning_rate: float = 1.5e-3
    tower_rate: float = 0.5  # of the learning rate, for the audio encoder
    spoken: float = 0.8  # share of the turns
    transcribed: float = 0.15  # of the spoken ones
    joined: float = 0.1  # of the strangers, who go on with more sentences
    interrupted: float = 0.2
    distortion: Distortion = WILD
    spelling: float = 0.3  # weight of the audio encoder's own loss, which goes on
    doubt: float = 0.6  # see `answering_loss`
    sure_until: float = 0.4  # share of the steps before it doubts
    seed: int = 4


_MOST_JOINED = 5


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """token_ids, labels: [n], labels of replies only; clips: each audio, in order; decisions:
    places of the token with which a reply begins that could have been UNKNOWN, but is not."""

    token_ids: list[int]
    labels: list[int]
    clips: list[Heard]
    decisions: list[int]


class Library:
    """Recordings by what is said in them."""

    def __init__(self, heard: list[Heard]):
        self._by_text: dict[str, list[Heard]] = defaultdict(list)
        for clip in heard:
            self._by_text[clip.text].append(clip)
        known = set(world.questions())
        self._strange = [text for text in self._by_text if text not in known]

    def clip(self, text: str, rng: random.Random) -> Heard:
        return rng.choice(self._by_text[text])

    def speech(self, rng: random.Random) -> Heard:
        """Several strange sentences, one after the other."""
        n = rng.randint(2, _MOST_JOINED)
        clips = [self.clip(rng.choice(self._strange), rng) for _ in range(n)]
        text = " ".join(clip.text for clip in clips if clip.text)
        return Heard(text, torch.cat([clip.mel for clip in clips], dim=1))

    def strangers(self, rng: random.Random) -> Iterator[str]:
        """Sentences of which there is a recording; empty ones are noise."""
        while True:
            yield rng.choice(self._strange)


class Writer:
    """Writes conversations down as the server does."""

    def __init__(self, tokenizer, library: Library, settings: ThinkerSettings, seed: int):
        self._tokenizer, self._library, self._settings = tokenizer, library, settings
        self._seed = seed
        self.begin(0)
        self._pad_id = tokenizer.convert_tokens_to_ids("<|audio_pad|>")
        self._end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.unknown_id = self._ids(world.UNKNOWN)[0]

    def begin(self, step: int) -> None:
        """What follows depends on this number and the seed alone."""
        self._rng = random.Random(f"{self._seed}/{step}")
        self._choose = drawing(self._seed, step)
        self._typed = strangers(random.Random(f"{self._seed}/{step}/typed"))

    def conversation(self) -> Conversation:
        rng = self._rng
        ids, labels, clips, decisions = [], [], [], []

        def write(piece: list[int], *, learned: bool = False) -> None:
            ids.extend(piece)
            labels.extend(piece if learned else [_IGNORED] * len(piece))

        write(self._ids(self._header()))
        memory = world.Memory()
        for _ in range(1 + int(_MAX_TURNS * rng.random() ** 2)):
            spoken = rng.random() < self._settings.spoken
            source = self._library.strangers(rng) if spoken else self._typed
            exchange = world.Caller(rng, source, memory).next()
            answer = exchange.answer
            if not spoken:
                write(self._ids(f"user\n{self._as_typed(exchange.question)}"))
            else:
                clip, goes_on = self._spoken(exchange)
                clips.append(clip)
                before, after = _AUDIO.split("<|audio_pad|>")
                places = int(n_places(torch.tensor(clip.mel.shape[1])))
                write(self._ids(f"user\n{before}") + [self._pad_id] * places + self._ids(after))
                is_asked = exchange.question and not goes_on
                if is_asked and rng.random() < self._settings.transcribed:
                    write(self._ids(TRANSCRIBE))
                    answer = exchange.question
            write(self._ids("<|im_end|>\n<|im_start|>") + self._ids("assistant\n"))
            reply = self._ids(answer)
            if answer not in (exchange.question, world.UNKNOWN):
                decisions.append(len(ids))
            write([*reply, self._end_id], learned=True)
            if rng.random() < self._settings.interrupted:
                # What was not heard is not remembered; learned it was all the same.
                n_lost = rng.randrange(len(reply))
                del ids[len(ids) - 1 - n_lost : len(ids) - 1]
                del labels[len(labels) - 1 - n_lost : len(labels) - 1]
                labels[-1] = _IGNORED
            write(self._ids("\n<|im_start|>"))
        return Conversation(ids, labels, clips, decisions)

    def _spoken(self, exchange: world.Exchange) -> tuple[Heard, bool]:
        """A recording of it, and whether its speaker went on with other things."""
        rng, settings = self._rng, self._settings
        goes_on = exchange.answer == world.UNKNOWN and rng.random() < settings.joined
        library = self._library
        clip = library.speech(rng) if goes_on else library.clip(exchange.question, rng)
        return replace(clip, mel=settings.distortion.apply(clip.mel, self._choose)), goes_on

    def spelling(self, text: str) -> torch.Tensor:
        """Token ids of what was said, none of noise."""
        return torch.tensor(self._ids(f" {text}") if text else [], dtype=torch.long)

    def _header(self) -> str:
        rng = self._rng
        if rng.random() < 0.3:
            return "<|im_start|>"
        said = rng.choice(_INSTRUCTIONS) if rng.random() < 0.6 else ""
        while not said or rng.random() < 0.3:
            said = f"{said} {next(self._typed).capitalize()}.".strip()
        return f"<|im_start|>system\n{said}<|im_end|>\n<|im_start|>"

    def _as_typed(self, text: str) -> str:
        rng = self._rng
        if rng.random() < 0.7:
            text = text.capitalize()
        text = text.replace(" i ", " I ") if rng.random() < 0.7 else text
        for name in (*world.NAMES, "France", "Japan", "Italy", "German"):
            if rng.random() < 0.8:
                text = text.replace(f" {name.lower()}", f" {name}")
        return text + rng.choice(("", "", ".", "?", "!"))

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def train_thinker(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    writers: list[Writer],
    settings: ThinkerSettings,
    log: Log,
    course: Course,
) -> None:
    """The audio encoder comes trained, and goes on learning slowly. Embeddings stay as they are.

    writers: one for each share of a batch.
    """
    torch.manual_seed(settings.seed)
    stack = thinker.model
    _initialise(thinker)
    stack.embed_tokens.weight.requires_grad_(False)
    language = [p for p in (*stack.parameters(), *thinker.lm_head.parameters()) if p.requires_grad]
    tower = list(thinker.audio_tower.parameters())
    rates = (1.0, settings.tower_rate)
    groups = [{"params": language}, {"params": tower}]
    optimiser = torch.optim.AdamW(groups, settings.learning_rate, betas=(0.9, 0.98))
    shares = Shares()
    for step in course.steps(settings.steps, thinker, optimiser):
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
            heard = hear(thinker, batch)
            logits, labels, decides = predict(thinker, batch, heard)
            loss = answering_loss(logits, labels, decides, writer.unknown_id, doubt)
            if heard:
                spelt = [writer.spelling(clip.text) for c in batch for clip in c.clips]
                loss = loss + settings.spelling * spelling_loss(heard, spelt, stack.embed_tokens)
            right = logits.argmax(-1) == labels
            return loss, right[decides].float().mean() if decides.any() else right.float().mean()

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
    """Cross entropy; where a reply begins, UNKNOWN counts as right by the share `doubt`.

    Who is less sure of the best answer than `doubt` then loses least with UNKNOWN ("Deep Gamblers",
    Liu et al. 2019, eq. 5, with doubt = 1 / o).
    """
    log_p = logits.log_softmax(-1)
    right = log_p.gather(-1, labels[:, None])[:, 0]
    if doubt:
        passed = log_p[:, unknown_id] + math.log(doubt)
        right = torch.where(decides, torch.logaddexp(right, passed), right)
    return -right.mean()


def hear(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration, batch: list[Conversation]
) -> list[torch.Tensor]:
    """What the thinker gets of each clip, [places, hidden]."""
    clips = [clip.mel.float() for c in batch for clip in c.clips]
    return encode(thinker.audio_tower, clips) if clips else []


def predict(
    thinker: Qwen3OmniMoeThinkerForConditionalGeneration,
    batch: list[Conversation],
    heard: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all tokens that are learned, one after the other: logits [n, vocabulary], labels [n], and
    whether the token is a decision [n]."""
    pad_id = thinker.config.audio_token_id
    ids = _padded([c.token_ids for c in batch], 0)
    labels = _padded([c.labels for c in batch], _IGNORED)[:, 1:]
    decides = torch.zeros_like(ids, dtype=torch.bool)
    for row, conversation in zip(decides, batch, strict=True):
        row[conversation.decisions] = True
    rows = thinker.model.embed_tokens(ids)
    if heard:
        rows = rows.masked_scatter((ids == pad_id)[..., None], torch.cat(heard))
    hidden = thinker.model(inputs_embeds=rows, use_cache=False).last_hidden_state
    learned = labels != _IGNORED
    return thinker.lm_head(hidden[:, :-1][learned]), labels[learned], decides[:, 1:][learned]


def _padded(rows: list[list[int]], value: int) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)
