"""A tiny random Chatterbox in the published layout, and the reference of its language model.

Its weights are made so that, as a trained model, it ends its pieces: what the embedding of some
codes says of the end, no layer changes, and the head reads it.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig

from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    DECODER_WEIGHTS,
    TOKENIZER,
    VOICE,
    VOICE_FILE,
    VOICES_FOLDER,
    WEIGHTS,
    voice_paths,
)
from sglang_live.models.chatterbox.parts import ChatterboxTalker
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.voice_files import read_recording, voice_files
from test.chatterbox import encoders
from test.chatterbox.encoders import recordings
from test.chatterbox.reference import END, N_CODES, T3
from test.flow.checkpoint import s3gen, s3gen_known
from test.noise import noise_of

N_BOOKS, CODES = 1, N_CODES
# Of the decoder, in the order of the files.
SOUNDS = ("default", "ben")
__all__ = ["VOICE", "recordings"]
SIZES = {
    "speaker": 12,
    "queries": 32,
    "text": 300,
    "speech": 8194,
    "text_places": 400,
    "speech_places": 1600,
}
N_ROWS = SIZES["queries"] + 2
WIDTH = 128
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 8.0


def config() -> LlamaConfig:
    """As published, with smaller sizes."""
    return LlamaConfig(
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 64,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    )


@cache
def model(end_every: int) -> T3:
    torch.manual_seed(5)
    made = T3(config(), SIZES).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.uniform_(0.7, 1.3, generator=rng)
            elif weight.dim() == 1:
                weight.normal_(0, 0.3, generator=rng)
            else:
                is_table = "_emb." in name or name.endswith("query")
                weight.normal_(0, 1.0 if is_table else 2 * weight.shape[-1] ** -0.5, generator=rng)
        for table in (made.text_emb, made.text_pos_emb.emb, made.speech_pos_emb.emb):
            table.weight[:, _LAST] = 0.0
        made.speech_emb.weight[:, _LAST] = -_CLEAR
        made.speech_emb.weight[2:N_CODES:end_every, _LAST] = _CLEAR
        made.speech_head.weight[:, _LAST] = 0.0
        made.speech_head.weight[END] = 0.0
        made.speech_head.weight[END, _LAST] = 4 * _CLEAR
        for layer in made.tfmr.layers:
            layer.self_attn.o_proj.weight[_LAST] = 0.0
            layer.mlp.down_proj.weight[_LAST] = 0.0
    return made


def build(path: Path, *, end_every: int = 64) -> Path:
    """Returns the checkpoint's directory.

    end_every: codes up to one that ends a piece.
    """
    path.mkdir(exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in model(end_every).state_dict().items()}
    save_file(weights, path / WEIGHTS)
    save_file(s3gen(is_mean=False).state_dict() | encoders.decoder_part(), path / DECODER_WEIGHTS)
    encoders.write(path)
    tokenizer().save(str(path / TOKENIZER))
    (path / VOICES_FOLDER).mkdir()
    for n, file in enumerate((path / VOICE_FILE, path / VOICES_FOLDER / "anna.pt")):
        torch.save({"t3": conditionals(n), "gen": s3gen_known(SOUNDS[n])}, file)
    return path


def conditionals(n: int) -> dict[str, torch.Tensor | None]:
    """What Chatterbox has made of a recording."""
    rng = torch.Generator().manual_seed(n)
    return {
        "speaker_emb": torch.randn(1, SIZES["speaker"], generator=rng),
        "clap_emb": None,
        "cond_prompt_speech_tokens": torch.randint(0, N_CODES, (1, 150 - 20 * n), generator=rng),
        "cond_prompt_speech_emb": None,
        "emotion_adv": (0.5 + 0.2 * n) * torch.ones(1, 1, 1),
    }


def recorded(path: Path, samples: np.ndarray) -> dict[str, torch.Tensor | None]:
    """What Chatterbox makes of a recording."""
    voice = RecordingEncoder(path).voice(samples)
    return conditionals(0) | {
        "speaker_emb": voice.speaker[None],
        "cond_prompt_speech_tokens": voice.codes[None],
        "emotion_adv": 0.5 * torch.ones(1, 1, 1),
    }


def tokenizer() -> Tokenizer:
    """Of characters and a few pairs, with the marks where they are published."""
    signs = [chr(n) for n in range(33, 127)]
    vocab = {"[STOP]": 0, "[UNK]": 1, "[SPACE]": 2}
    vocab |= {sign: 3 + n for n, sign in enumerate(signs)}
    pairs = [(a, b) for a in "aeiou" for b in "nrst"]
    vocab |= {a + b: 3 + len(signs) + n for n, (a, b) in enumerate(pairs)}
    vocab["[START]"] = 255
    made = Tokenizer(models.BPE(vocab, pairs, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    made.add_special_tokens(
        [AddedToken(name, normalized=False) for name in vocab if name[0] == "[" and len(name) > 1]
    )
    return made


def text_ids(path: Path, text: str) -> list[int]:
    """As ChatterboxTTS.generate makes them."""
    ids: list[int] = (
        Tokenizer.from_file(str(path / TOKENIZER))
        .encode(punc_norm(text).replace(" ", "[SPACE]"))
        .ids
    )
    return [255, *ids, 0]


def punc_norm(text: str) -> str:
    if text[0].islower():
        text = text[0].upper() + text[1:]
    text = " ".join(text.split())
    for old, new in (("...", ", "), (":", ","), (" - ", ", "), (";", ", "), (" ,", ",")):
        text = text.replace(old, new)
    text = text.rstrip(" ")
    return text if text[-1] in ".!?-," else text + "."


class Reference:
    """The checkpoint restated, without what a talker in an engine adds."""

    def __init__(self, path: Path, voices: Path | None = None, end_every: int = 64):
        self.talker = ChatterboxTalker(path, voices)
        self._path = path
        self._voices = {
            name: torch.load(file, weights_only=True)["t3"]
            for name, file in voice_paths(path).items()
        }
        for name, file in ({} if voices is None else voice_files(voices)).items():
            self._voices[name] = recorded(path, read_recording(file, RECORDING_RATE_HZ))
        self.model = model(end_every)

    def bring(self, name: str, samples: np.ndarray) -> None:
        """A voice that a response brings along."""
        self._voices[name] = recorded(self._path, samples)

    def piece(
        self, text: str, most_frames: int, voice: str = VOICE, seed: int | None = None
    ) -> np.ndarray:
        """[n_frames, 1]; seed: None: the likeliest codes."""
        noise = None if seed is None else noise_of(seed)
        codes = self.model.inference(
            self._voices[voice], text_ids(self._path, text), most_frames, noise=noise
        )
        return np.array(codes)[:, None]


def changed_voice(path: Path, **changes) -> None:
    """The default voice with other values."""
    known = s3gen_known(SOUNDS[0])
    torch.save({"t3": conditionals(0) | changes, "gen": known}, path / VOICE_FILE)


def header(path: Path) -> dict:
    """Of the weights."""
    data = (path / WEIGHTS).read_bytes()
    found: dict = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found
