"""One model that hears and speaks: a small random Llama that hears tones as ids, and writes two
letters and then the four codes that say them, in turns. Which ones depends on all that is before
them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_live.core import INPUT_RATE_HZ, HistoryItem, TextPart
from sglang_live.models.family import ModelFacts, read_json
from sglang_live.models.own_voice import OwnVoice
from sglang_live.models.prompt import Markup, Piece, PiecewisePrompt, Words
from test.toys import counting
from test.toys.counting import FRAME_S, LETTERS, N_CODES, VOICE

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
SIGNS = ["_", " ", ".", *LETTERS]  # the first one stands for all others
CODES = [f"<|audio_{code}|>" for code in range(N_CODES)]
MARKUP = [USER, ASSISTANT, END]
VOCAB = [*SIGNS, *MARKUP, *CODES]
FIRST_CODE = len(SIGNS) + len(MARKUP)
END_ID = VOCAB.index(END)
N_TEXT, N_SPEECH = 2, 4  # ids of a stretch
_PHASES = N_TEXT + N_SPEECH
_HIDDEN = 96


class Hears:
    thinker = f"{__name__}:Thinker"
    recogniser = talker = voice = None
    decoder = f"{counting.__name__}:Tones"

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("toy") == "hears"

    def facts(self, path: Path) -> ModelFacts:
        return ModelFacts(
            path=path,
            weights=path,
            family=__name__,
            stages=("thinker", "vocoder"),
            own_voice=True,
            voices=(VOICE,),
            vocab_size=len(VOCAB),
            context_tokens=read_json(path / "config.json")["max_position_embeddings"],
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        """Any number of ranks may be tried."""


class Ears:
    def move(self, device: str) -> None:
        """They are numpy's."""

    def ids(self, pcm: np.ndarray) -> Sequence[int]:
        frames = pcm[: len(pcm) // _N_SAMPLES * _N_SAMPLES].reshape(-1, _N_SAMPLES)
        strength = np.abs(np.fft.rfft(frames.astype(float)))[:, 1 : 1 + N_CODES]
        return [FIRST_CODE + int(one.argmax()) for one in strength if one.any()]


_N_SAMPLES = round(FRAME_S * INPUT_RATE_HZ)


class Prompt(PiecewisePrompt):
    def header(self, instructions: str) -> list[Piece]:
        return [Markup(END), self._words(instructions)]

    def item(self, item: HistoryItem) -> list[Piece]:
        text = "".join(part.text for part in item.parts if isinstance(part, TextPart))
        said = self._words(text) if item.token_ids is None else Words(item.token_ids)
        role = ASSISTANT if item.role == "assistant" else USER
        return [Markup(role * item.opens), said, Markup(END * item.closes)]

    def open_response(self) -> list[Piece]:
        return [Markup(ASSISTANT)]

    def close_response(self, *, model_wrote_end: bool) -> list[Piece]:
        return [] if model_wrote_end else [Markup(END)]


class Thinker:
    external_models, clip_form = "", None
    sampling: Mapping[str, float] = {"temperature": 0.0}
    ears = Ears()
    voice = OwnVoice(
        first_id=FIRST_CODE,
        n_codes=N_CODES,
        frame_s=FRAME_S,
        chunk_frames=4,
        frames_per_token=N_SPEECH / N_TEXT,
    )

    def __init__(self, path: Path):
        """Its checkpoint is SGLang's as it is."""

    def engine_args(self, cache_dir: Path) -> dict[str, Any]:
        return {"enable_multimodal": False}

    def prompt(self, tokenizer: Any) -> Prompt:
        return Prompt(tokenizer, (END_ID,), ("", ""))


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each sign."""
    signs = {sign: token for token, sign in enumerate(SIGNS)}
    made = Tokenizer(models.WordLevel(signs, unk_token=SIGNS[0]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*MARKUP, *CODES])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def _phase(token: int) -> int:
    """Place in a stretch."""
    if token >= FIRST_CODE:
        return N_TEXT + (token - FIRST_CODE) % N_SPEECH
    sign = VOCAB[token]
    return LETTERS.index(sign) % N_TEXT if sign in LETTERS else _PHASES - 1


@torch.no_grad()
def build(path: Path) -> Path:
    """Returns the checkpoint's directory. Its model ends no response by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END_ID,
    )
    model = LlamaForCausalLM(config).eval()
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    # The first numbers of a state are the place in a stretch, which no layer changes.
    embed[:, :_PHASES] = 4.0 * torch.eye(_PHASES)[[_phase(token) for token in range(len(VOCAB))]]
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[:_PHASES] = 0.0
        layer.mlp.down_proj.weight[:_PHASES] = 0.0
    for token in range(len(VOCAB)):
        written = token >= FIRST_CODE or VOCAB[token] in LETTERS
        head[token] *= written
        head[token, :_PHASES] = 20.0 * written * torch.eye(_PHASES)[_phase(token) - 1]
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    own = {"toy": "hears", "toy_books": 1}
    document = path / "config.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), **own}))
    return path


FAMILY = Hears()
