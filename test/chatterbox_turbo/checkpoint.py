"""A tiny random Chatterbox Turbo in the published layout, and the reference of its language model.

Its weights are made so that, as a trained model, it ends its pieces (test/chatterbox).
"""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast

from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import (
    MEAN_WEIGHTS,
    VOICE,
    VOICE_FILE,
    VOICES_FOLDER,
    voice_paths,
)
from sglang_live.models.chatterbox_turbo.family import WEIGHTS
from sglang_live.models.chatterbox_turbo.parts import TurboTalker
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.voice_files import read_recording, voice_files
from test.chatterbox import encoders
from test.chatterbox.encoders import recordings
from test.chatterbox_turbo.reference import END, N_CODES, N_IDS, T3
from test.flow.checkpoint import s3gen, s3gen_known
from test.noise import noise_of

N_BOOKS, CODES = 1, N_CODES
# Of the decoder, in the order of the files.
SOUNDS = ("default", "ben")
__all__ = ["VOICE", "recordings"]
N_SPEAKER, N_TEXT, N_PLACES, WIDTH = 12, 300, 2000, 128
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 40.0


def config() -> GPT2Config:
    """As published, with smaller sizes."""
    return GPT2Config(
        vocab_size=N_TEXT,
        bos_token_id=0,
        eos_token_id=0,
        n_embd=WIDTH,
        n_head=WIDTH // 64,
        n_layer=2,
        n_positions=N_PLACES,
    )


@cache
def model(end_every: int) -> T3:
    torch.manual_seed(5)
    made = T3(config(), N_SPEAKER, N_TEXT).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if ".ln_" in name and name.endswith("weight"):
                weight.uniform_(0.7, 1.3, generator=rng)
            elif weight.dim() == 1:
                weight.normal_(0, 0.3, generator=rng)
            elif "_emb." in name or "wpe" in name:
                weight.normal_(0, 1.0, generator=rng)
            else:
                n_in = weight.shape[0] if "tfmr" in name else weight.shape[1]
                weight.normal_(0, 2 * n_in**-0.5, generator=rng)
        for table in (made.text_emb, made.tfmr.wpe):
            table.weight[:, _LAST] = 0.0
        made.speech_emb.weight[:, _LAST] = -_CLEAR
        made.speech_emb.weight[2:N_CODES:end_every, _LAST] = _CLEAR
        made.speech_head.weight[:, _LAST] = 0.0
        made.speech_head.weight[END] = 0.0
        made.speech_head.weight[END, _LAST] = _CLEAR
        made.speech_head.bias[END] = 0.0
        for layer in made.tfmr.h:
            for part in (layer.attn.c_proj, layer.mlp.c_proj):
                part.weight[:, _LAST] = 0.0
                part.bias[_LAST] = 0.0
    return made


def build(path: Path, *, end_every: int = 64) -> Path:
    """Returns the checkpoint's directory.

    end_every: codes up to one that ends a piece.
    """
    path.mkdir(exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in model(end_every).state_dict().items()}
    save_file(weights, path / WEIGHTS[0])
    save_file(s3gen(is_mean=True).state_dict() | encoders.decoder_part(), path / MEAN_WEIGHTS)
    encoders.write(path)
    tokenizer().save_pretrained(path)
    (path / VOICES_FOLDER).mkdir()
    for n, file in enumerate((path / VOICE_FILE, path / VOICES_FOLDER / "anna.pt")):
        torch.save({"t3": conditionals(n), "gen": s3gen_known(SOUNDS[n])}, file)
    return path


def conditionals(n: int) -> dict[str, torch.Tensor | None]:
    """What Turbo has made of a recording."""
    rng = torch.Generator().manual_seed(n)
    return {
        "speaker_emb": torch.randn(1, N_SPEAKER, generator=rng),
        "clap_emb": None,
        "cond_prompt_speech_tokens": torch.randint(0, N_CODES, (1, 75 - 20 * n), generator=rng),
        "cond_prompt_speech_emb": None,
        "emotion_adv": None,
    }


def recorded(path: Path, samples: np.ndarray) -> dict[str, torch.Tensor | None]:
    """What Turbo makes of a recording."""
    voice = RecordingEncoder(path).voice(samples)
    return conditionals(0) | {
        "speaker_emb": voice.speaker[None],
        "cond_prompt_speech_tokens": voice.codes[None],
    }


def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, as GPT-2's, and a tag that is one id."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({sign: n for n, sign in enumerate(signs)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["[laugh]"]})
    return fast


def punc_norm(text: str) -> str:
    if text[0].islower():
        text = text[0].upper() + text[1:]
    text = " ".join(text.split()).replace(":", ",").replace(" ,", ",").rstrip(" ")
    return text if text[-1] in ".!?-," else text + "."


class Reference:
    """The checkpoint restated, without what a talker in an engine adds.

    seed: for draws; the likeliest codes only go round.
    """

    seed = 11

    def __init__(self, path: Path, voices: Path | None = None, end_every: int = 64):
        self.talker = TurboTalker(path, voices)
        self._path, self._tokenizer = path, tokenizer()
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
        ids = self._tokenizer.encode(punc_norm(text), add_special_tokens=False)
        codes = self.model.inference(self._voices[voice], ids, most_frames, noise=noise)
        return np.array(codes, dtype=np.int64)[:, None]


assert N_IDS == END + 1
