"""Random weights with which a model computes what it computes with trained ones, at the same cost.

Every layer passes a signal of about unit size: N(0, 1/fan_in), norms 1, biases 0. So the tokens of
a batch are sent to experts nearly as different as if they were drawn. SGLang's own dummy weights
are within a thousandth of 0, norms too, and equal in all layers: a token goes the same way in each
of them, and all ids are sampled alike, ends too.
"""

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lab.random_model.folder import Facts

# Their rows are read one by one, so that fan-in means nothing.
_TABLES = ("embed_tokens.weight", "codec_embedding", "pos_embed.weight")
_NEVER, _AT_ONCE = -1e4, 1e4


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Fill every parameter on its device. A parameter depends on the seed and on its name."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point():
            raise ValueError(f"{name} is {weight.dtype}: random weights are not quantised")
        if weight.dim() < 2:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        torch.manual_seed(seed ^ zlib.crc32(name.encode()))
        weight.normal_(0.0, 1.0 if name.endswith(_TABLES) else fan_in(weight) ** -0.5)


def fan_in(weight: Tensor) -> int:
    """[out, in], a stack [n, out, in] of experts or steps, or a convolution [out, in, …]."""
    return weight.shape[-1] if weight.dim() <= 3 else math.prod(weight.shape[1:])


@torch.no_grad()
def speak_words_only(head: Tensor, facts: Facts) -> None:
    """Give every token except the spoken ones logit 0, below the likeliest words."""
    others = torch.ones(head.shape[0], dtype=torch.bool, device=head.device)
    others[list(facts.spoken_ids)] = False
    head.masked_fill_(others.unsqueeze(1), 0.0)


@torch.no_grad()
def prepare_talker(model: Any, facts: Facts) -> None:
    """What the loader of a checkpoint does after it has filled the parameters, and its end."""
    widths = model.ids.text_vocab, model.text_projection.linear_fc1.in_features
    weight = model.codec_head.weight
    torch.manual_seed(facts.seed)
    model.prepare(torch.randn(widths, device=weight.device, dtype=weight.dtype))
    model._penalise = partial(end_with_text, model._penalise, model, facts.frames_per_token)


def end_with_text(
    penalise: Callable[[Tensor, Tensor, Tensor], None],
    model: Any,
    frames_per_token: float,
    logits: Tensor,
    rows: Tensor,
    frame: Tensor,
) -> None:
    """Around SpeechLM._penalise: sample the end when the text has had its frames, and only then.

    While text is missing the talker waits for it: a row then has at least `frame` tokens. Behind
    the one in the prompt a row has the others and their end, as many as there are tokens.
    """
    penalise(logits, rows, frame)
    talker = model.config.talker
    in_row = model.rows.text_ids[rows] != talker["tts_pad_token_id"]
    n_tokens = in_row.sum(dim=1).clamp(min=1)
    ended = frame >= (n_tokens * frames_per_token).ceil()
    end = logits[:, talker["codec_eos_token_id"]]
    end.fill_(_NEVER).masked_fill_(ended, _AT_ONCE)
