"""What the toy families share: a Llama that adds nothing to what its last frame says, so that its
head alone tells what follows; and a codec of tones."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_live.models.family import ModelFacts, read_json
from sglang_live.models.speech_lm.frame_decoder import check_codes

LETTERS = string.ascii_lowercase
# Of a book: the last one ends a piece.
N_CODES = 32
END_CODE = N_CODES - 1
HIDDEN = 128
VOICE = "beep"
FRAME_S, RATE_HZ = 0.08, 24_000
N_SAMPLES = round(FRAME_S * RATE_HZ)


class ToyFamily:
    """claims: checkpoints whose config.json has its kind as "toy"."""

    thinker = recogniser = voice = None
    decoder = f"{__name__}:Tones"

    def __init__(self, kind: str, talker: str, duplex_s: float = 0.0):
        self._kind, self._duplex_s = kind, duplex_s
        self.talker = talker

    def claims(self, config: Mapping[str, Any]) -> bool:
        return config.get("toy") == self._kind

    def facts(self, path: Path) -> ModelFacts:
        return ModelFacts(
            path=path,
            weights=path,
            family=self.talker.partition(":")[0],
            stages=("talker", "vocoder"),
            talker_reads_text=not self._duplex_s,
            voices=(VOICE,),
            duplex_s=self._duplex_s,
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        """Any number of ranks may be tried."""


def letters_of(text: str) -> list[int]:
    """Places of its letters in the alphabet; those of "a" if there are none."""
    return [LETTERS.index(sign) for sign in text.lower() if sign in LETTERS] or [0]


def counted(text: str) -> range:
    """The codes of a piece: from its last letter on, up to the end."""
    return range(letters_of(text)[-1], END_CODE)


def one_hot(at: int, height: float = 1.0) -> Tensor:
    return height * torch.eye(HIDDEN)[at]


def save(path: Path, kind: str, n_books: int, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Write a checkpoint that SGLang loads as it is. Returns its directory.

    Args:
        tensors: beside those of the layers.
        config: its architecture, its ids, and what else config.json has.
    """
    torch.manual_seed(0)
    square = torch.randn(HIDDEN, HIDDEN)
    layer = {f"self_attn.{part}_proj": square for part in "qkv"}
    layer |= {"mlp.gate_proj": square, "mlp.up_proj": square}
    # What attention and FFN find is left out.
    layer |= {"self_attn.o_proj": 0 * square, "mlp.down_proj": 0 * square}
    layer |= {name: torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
    found = {f"model.layers.0.{name}.weight": tensor.clone() for name, tensor in layer.items()}
    found["model.norm.weight"] = torch.ones(HIDDEN)
    path.mkdir(parents=True, exist_ok=True)
    save_file(found | tensors, path / "model.safetensors")
    document = {
        "toy": kind,
        "toy_books": n_books,
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": HIDDEN // 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "dtype": "float32",
        **config,
    }
    (path / "config.json").write_text(json.dumps(document))
    return path


class Tones:
    """A decoder (stages/vocoder/decoders.py: StreamDecoder): each code of a frame is a tone, which
    has whole waves in the frame. An encoder as well, which finds them.

    Attributes:
        encoder: for a family that hears.
    """

    n_tail_frames = n_context_frames = 0
    sample_rate_hz, samples_per_frame = RATE_HZ, N_SAMPLES
    _APART = N_CODES + 8  # from the tones of a book to those of the next one

    def __init__(self, n_quantizers: int):
        self.n_quantizers = n_quantizers
        self.encoder = self

    @classmethod
    def from_pretrained(cls, path: str | Path, device: Any, dtype: Any) -> "Tones":
        return cls(read_json(Path(path) / "config.json")["toy_books"])

    def new_stream(self) -> object:
        """It needs no state."""
        return object()

    def use_graphs(self, max_streams: int) -> None:
        """There are none."""

    def check_codes(self, codes: Tensor) -> None:
        check_codes(codes, self.n_quantizers, N_CODES)

    def decode(self, streams: list[object], codes: Tensor) -> Tensor:
        waves = 1 + codes + self._APART * torch.arange(self.n_quantizers)
        angle = 2 * torch.pi * torch.arange(N_SAMPLES) / N_SAMPLES
        return 0.2 * (waves.unsqueeze(-1) * angle).sin().sum(dim=2).flatten(1)

    def encode(self, streams: list[object], samples: Tensor) -> Tensor:
        """[n_streams, n_quantizers] of samples [n_streams, samples_per_frame]."""
        strength = torch.fft.rfft(samples).abs()[:, 1 : 1 + self._APART * self.n_quantizers]
        return strength.unflatten(1, (-1, self._APART))[..., :N_CODES].argmax(dim=2)
