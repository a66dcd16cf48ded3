"""The talker's training: from the words of a response, one per frame, to its codec codes.

Inputs are those that the server makes: user messages as text or as hidden states of the thinker,
nine positions before a response, then a frame's codes and the next word at each step. In training,
past codes are randomly replaced, from single codes to whole responses: a talker that depended on
its past more than on the words would turn one wrong code into many when it runs freely.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from training.demo.schedule import Log, ResumableSteps, cosine, step_generator
from training.demo.sizes import N_CODEBOOKS

_IGNORED = -100
# Sampling settings of the reference.
_TOP_K, _TEMPERATURE, _PREDICTOR_TOP_P = 50, 0.9, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings:
    steps: int = 6000
    batch: int = 8
    learning_rate: float = 2e-3
    predictor_frames: int = 160  # frames of a batch on which the residual codes are trained
    damaged_code: float = 0.1  # probability that a past code is replaced
    damaged_frame: float = 0.2  # probability that all codes of a past frame are replaced
    damaged_response: float = 0.15  # probability that all past frames are replaced
    sharpening: float = 2.0  # factor on the trained heads, so that sampling seldom errs
    seed: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class SpokenResponse:
    """A response.

    token_ids: as the thinker writes them.
    codes: [frames, 16].
    """

    token_ids: list[int]
    codes: torch.Tensor


class TalkerInputs:
    """Makes the talker's input embeddings.

    Args:
        talker: its projections and codec embeddings are used and get gradients.
        embed_tokens: the thinker's token embeddings, frozen.
        config: config of the whole model.
        newline_id: the token after a role's name.
    """

    def __init__(
        self,
        talker: Qwen3OmniMoeTalkerForConditionalGeneration,
        embed_tokens: nn.Embedding,
        config,
        newline_id: int,
    ):
        self._talker, self._embed, self._config = talker, embed_tokens, config
        self._newline = newline_id
        self.end = config.talker_config.codec_eos_token_id

    def user(self, token_ids: list[int], hidden: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of one user message: text, then hidden states if given."""
        config = self._config
        opening = self.text([config.im_start_token_id, config.user_token_id, self._newline])
        parts = [opening, self.text(token_ids)]
        if hidden is not None:
            audio = config.thinker_config
            parts += [
                self.text([audio.audio_start_token_id]),
                self._talker.hidden_projection(hidden),
                self.text([audio.audio_end_token_id]),
            ]
        return torch.cat([*parts, self.text([config.im_end_token_id, self._newline])])

    def response_prefix(self, speaker_id: int, first_id: int) -> torch.Tensor:
        """[9, hidden] before the first frame."""
        config, codec = self._config, self._config.talker_config
        pad = [config.tts_pad_token_id] * 4
        text = self.text(
            [
                config.im_start_token_id, config.assistant_token_id, self._newline, *pad,
                config.tts_bos_token_id, first_id,
            ]
        )  # fmt: skip
        codes = [
            codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id,
            speaker_id, codec.codec_pad_id, codec.codec_bos_id,
        ]  # fmt: skip
        added = self._talker.model.codec_embedding(torch.tensor(codes))
        return text + functional.pad(added, (0, 0, 3, 0))

    def following(self, token_ids: list[int], n: int) -> torch.Tensor:
        """[n, hidden] of the text added to frames: all tokens but the first, an end, then pads."""
        config = self._config
        ids = [*token_ids[1:], config.tts_eos_token_id]
        ids += [config.tts_pad_token_id] * (n - len(ids))
        return self.text(ids[:n])

    def frames(self, codes: torch.Tensor) -> torch.Tensor:
        """[n, hidden] from [n, 16] codes."""
        total = self._talker.model.codec_embedding(codes[:, 0])
        for group, embedding in enumerate(self._talker.code_predictor.get_input_embeddings()):
            total = total + embedding(codes[:, group + 1])
        return total

    def text(self, token_ids: list[int]) -> torch.Tensor:
        return self._talker.text_projection(self._embed(torch.tensor(token_ids, dtype=torch.long)))


def train_talker(
    talker: Qwen3OmniMoeTalkerForConditionalGeneration,
    inputs: TalkerInputs,
    speaker_ids: list[int],
    responses: list[SpokenResponse],
    questions: list[list[int]],
    settings: TalkerSettings,
    log: Log,
    resumable: ResumableSteps,
) -> None:
    """Train the talker on the responses.

    questions: token ids of possible earlier user messages.
    """
    torch.manual_seed(settings.seed)
    initialise(talker)
    optimiser = torch.optim.AdamW(
        talker.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    for step in resumable.steps(settings.steps, talker, optimiser):
        choose = step_generator(settings.seed, step)
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * cosine(step, settings.steps, warm_up=100)
        rows, targets, starts = [], [], []
        batch = _batch(responses, settings.batch, choose)
        for response in batch:
            context = _context(inputs, questions, choose)
            row, target = _sequence(inputs, context, speaker_ids, response, settings, choose)
            starts.append(len(row) - len(response.codes) - 1)
            rows.append(row)
            targets.append(target)
        hidden = talker.model(inputs_embeds=_padded(rows, 0.0), use_cache=False).last_hidden_state
        logits = talker.codec_head(hidden)
        first = functional.cross_entropy(
            logits.flatten(0, 1), _padded(targets, _IGNORED).flatten(), ignore_index=_IGNORED
        )
        spoken = torch.cat(
            [h[at : at + len(r.codes)] for h, at, r in zip(hidden, starts, batch, strict=True)]
        )
        codes = torch.cat([r.codes for r in batch])
        some = torch.randperm(len(codes), generator=choose)[: settings.predictor_frames]
        rest = _residual_loss(talker, spoken[some], codes[some], settings.damaged_code, choose)
        (first + 2 * rest).backward()
        nn.utils.clip_grad_norm_(talker.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        log(step, first=first, rest=rest)
    with torch.no_grad():
        talker.codec_head.weight.mul_(settings.sharpening)
        for head in talker.code_predictor.lm_head:
            head.weight.mul_(settings.sharpening)
    talker.eval()


@torch.no_grad()
def speak(
    talker: Qwen3OmniMoeTalkerForConditionalGeneration,
    inputs: TalkerInputs,
    context: torch.Tensor,
    speaker_id: int,
    token_ids: list[int],
    choose: torch.Generator,
    max_frames: int,
) -> torch.Tensor:
    """[frames, 16] sampled codes of a response, as the reference samples them (no penalty)."""
    following = inputs.following(token_ids, max_frames)
    step = torch.cat([context, inputs.response_prefix(speaker_id, token_ids[0])])
    cache, frames = DynamicCache(), []
    forbidden = torch.arange(talker.vocab_size) >= talker.vocab_size - 1024
    forbidden[inputs.end] = False
    for n in range(max_frames):
        out = talker.model(inputs_embeds=step[None], past_key_values=cache, use_cache=True)
        hidden = out.last_hidden_state[0, -1]
        logits = talker.codec_head(hidden).masked_fill(forbidden, -torch.inf)
        code = _sample(logits / _TEMPERATURE, choose)
        if code == inputs.end:
            break
        codes = [code]
        steps = [hidden, talker.model.codec_embedding(torch.tensor(code))]
        for group in range(N_CODEBOOKS - 1):
            out = talker.code_predictor.model(inputs_embeds=torch.stack(steps)[None])
            logits = talker.code_predictor.lm_head[group](out.last_hidden_state[0, -1])
            codes.append(_sample(logits, choose, top_p=_PREDICTOR_TOP_P))
            embedding = talker.code_predictor.get_input_embeddings()[group]
            steps.append(embedding(torch.tensor(codes[-1])))
        frames.append(torch.tensor(codes))
        step = inputs.frames(frames[-1][None]) + following[n : n + 1]
    return torch.stack(frames) if frames else torch.zeros(0, N_CODEBOOKS, dtype=torch.long)


@torch.no_grad()
def initialise(module: nn.Module) -> None:
    """Draw weights of deviation 1 / sqrt(fan-in): transformers leaves the experts unset."""
    for name, weight in module.named_parameters():
        if weight.dim() < 2:
            continue
        embeds = "embed" in name
        nn.init.normal_(weight, 0.0, 0.3 if embeds else weight.shape[-1] ** -0.5)


def _batch(
    responses: list[SpokenResponse], n: int, choose: torch.Generator
) -> list[SpokenResponse]:
    """Responses of similar length, which need little padding; all frames are equally likely."""
    jitter = 1 + 0.3 * torch.rand(len(responses), generator=choose)
    lengths = torch.tensor([len(response.codes) for response in responses]) * jitter
    order = lengths.argsort().tolist()
    groups = [order[i : i + n] for i in range(0, len(order), n)]
    frames = torch.tensor([sum(len(responses[i].codes) for i in group) for group in groups])
    chosen = groups[int(torch.multinomial(frames.float(), 1, generator=choose))]
    return [responses[i] for i in chosen]


def _context(
    inputs: TalkerInputs, questions: list[list[int]], choose: torch.Generator
) -> torch.Tensor:
    """[n, hidden] of up to three user messages, unrelated to the response."""

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=choose))

    messages = []
    for _ in range(below(4)):
        if below(2):
            messages.append(inputs.user(questions[below(len(questions))]))
        else:
            size = 10 ** (1.5 * float(torch.rand((), generator=choose)) - 0.75)
            width = inputs._config.thinker_config.text_config.hidden_size
            hidden = torch.randn(5 + below(45), width, generator=choose) * size
            messages.append(inputs.user([], hidden))
    if not messages:
        messages.append(inputs.user(questions[below(len(questions))]))
    return torch.cat(messages)


def _sequence(
    inputs: TalkerInputs,
    context: torch.Tensor,
    speaker_ids: list[int],
    response: SpokenResponse,
    settings: TalkerSettings,
    choose: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [n, hidden], and the first code of the frame after each, [n]."""
    n = len(response.codes)
    speaker = speaker_ids[int(torch.randint(len(speaker_ids), (), generator=choose))]
    prefix = inputs.response_prefix(speaker, response.token_ids[0])
    past = _damaged(response.codes, settings, choose)
    frames = inputs.frames(past) + inputs.following(response.token_ids, n)
    row = torch.cat([context, prefix, frames])
    target = torch.full((len(row),), _IGNORED)
    target[-n - 1 : -1] = response.codes[:, 0]
    target[-1] = inputs.end
    return row, target


def _damaged(codes: torch.Tensor, settings: TalkerSettings, choose: torch.Generator):
    n, groups = codes.shape
    other = torch.randint(int(codes.max()) + 1, codes.shape, generator=choose)
    share = 1.0 if torch.rand((), generator=choose) < settings.damaged_response else None
    frame = torch.rand(n, 1, generator=choose) < (share or settings.damaged_frame)
    code = torch.rand(n, groups, generator=choose) < settings.damaged_code
    return torch.where(frame | code, other, codes)


def _residual_loss(
    talker: Qwen3OmniMoeTalkerForConditionalGeneration,
    hidden: torch.Tensor,
    codes: torch.Tensor,
    damaged: float,
    choose: torch.Generator,
) -> torch.Tensor:
    """hidden: [n, hidden] from which the frame was predicted; codes: [n, 16]."""
    predictor = talker.code_predictor
    other = torch.randint(predictor.vocab_size, codes.shape, generator=choose)
    given = torch.where(torch.rand(codes.shape, generator=choose) < damaged, other, codes)
    embeddings = predictor.get_input_embeddings()
    steps = [hidden, talker.model.codec_embedding(codes[:, 0])]
    steps += [embeddings[g](given[:, g + 1]) for g in range(N_CODEBOOKS - 2)]
    out = predictor.model(inputs_embeds=torch.stack(steps, 1), use_cache=False).last_hidden_state
    logits = torch.stack(
        [predictor.lm_head[g](out[:, g + 1]) for g in range(N_CODEBOOKS - 1)], dim=1
    )
    return functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())


def _padded(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _sample(logits: torch.Tensor, choose: torch.Generator, top_p: float = 1.0) -> int:
    values, ids = logits.topk(min(_TOP_K, len(logits)))
    chances = values.softmax(-1)
    before = chances.cumsum(-1) - chances
    chances = chances.masked_fill(before >= top_p, 0.0)
    return int(ids[torch.multinomial(chances, 1, generator=choose)])
