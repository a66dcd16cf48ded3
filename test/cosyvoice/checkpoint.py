"""A tiny random CosyVoice in the published layout, and the reference of its language model.

Its weights are made so that, as a trained model, it repeats codes, and ends its pieces: few codes
are likely, and what the embedding of some says of the end, no layer changes, and the head reads it.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen2Config

from sglang_live.models.codecs.flow.decoder import VOICE_PARTS
from sglang_live.models.codecs.flow.recording import RATE_HZ
from sglang_live.models.cosyvoice.encoder import RecordingEncoder
from sglang_live.models.cosyvoice.family import BASE, VOICES, WEIGHTS
from sglang_live.models.cosyvoice.parts import CosyVoiceTalker
from sglang_live.models.voice_files import read_recording, voice_files, words_of
from test.cosyvoice import encoders
from test.cosyvoice.encoders import recordings
from test.cosyvoice.reference import N_CODES, CosyVoiceLM
from test.flow.checkpoint import save_weights
from test.noise import noise_of

__all__ = ["recordings"]
N_BOOKS, CODES, VOICE = 1, N_CODES, "anna"
TEXT_VOCAB, WIDTH = 320, 64
END_OF_PROMPT = 259  # behind the bytes, and the marks before it
VOICES_OF_TWO = {VOICE: (20, 40), "bert": (24, 31)}
# One of this many codes is likely.
_LIKELY = 20
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 8.0
# The same, that text is next.
_FILL = 2


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=TEXT_VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )


@cache
def model(end_every: int, version: int, fill_every: int = 0) -> CosyVoiceLM:
    torch.manual_seed(5)
    made = CosyVoiceLM(config(), version).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.uniform_(0.7, 1.3, generator=rng)
            elif weight.dim() == 1:
                weight.normal_(0, 0.3, generator=rng)
            else:
                scale = 1.0 if "embed" in name else 2 * weight.shape[-1] ** -0.5
                weight.normal_(0, scale, generator=rng)
        language_model = made.llm.model.model
        language_model.embed_tokens.weight[:, _LAST] = 0.0
        spoken, head = made.speech_embedding.weight, made.llm_decoder.weight
        spoken[:, _LAST] = -_CLEAR
        # Version 3 would end too often by its likeliest code.
        first = _LIKELY * (version - 2)
        spoken[first : N_CODES : _LIKELY * end_every, _LAST] = _CLEAR
        if version == 2:
            made.llm_embedding.weight[:, _LAST] = -_CLEAR
        end = N_CODES + (version == 3)
        # A dimension that is the same in all: it makes codes unlikely, also without a bias.
        for table in (language_model.embed_tokens.weight, spoken):
            table[:, 1] = _CLEAR
        if version == 2:
            made.llm_embedding.weight[:, 1] = _CLEAR
        head[:, _LAST] = 0.0
        head[:, 1] = -_CLEAR
        head[:N_CODES:_LIKELY, 1] = 0.0
        head[end] = 0.0
        head[end, _LAST] = 4 * _CLEAR
        if fill_every:
            for table in (language_model.embed_tokens.weight, spoken):
                table[:, _FILL] = -_CLEAR
            if version == 2:
                made.llm_embedding.weight[:, _FILL] = -_CLEAR
            spoken[_LIKELY : N_CODES : _LIKELY * fill_every, _FILL] = _CLEAR
            head[:, _FILL] = 0.0
            head[N_CODES + version] = 0.0
            head[N_CODES + version, _FILL] = 4 * _CLEAR
        for layer in language_model.layers:
            for said in (_LAST, 1, _FILL)[: 3 if fill_every else 2]:
                layer.self_attn.o_proj.weight[said] = 0.0
                layer.mlp.down_proj.weight[said] = 0.0
    return made


def build(
    path: Path,
    *,
    end_every: int = 64,
    version: int = 2,
    fill_every: int = 0,
    voices: dict[str, tuple[int, int]] = VOICES_OF_TWO,
) -> Path:
    """Returns the checkpoint's directory.

    end_every, fill_every: likely codes up to one that ends a piece, or one behind which text is
    next; 0: none. voices: words and codes of each.
    """
    path.mkdir(exist_ok=True)
    (path / f"cosyvoice{version}.yaml").write_text("sample_rate: 24000\n")
    torch.save(model(end_every, version, fill_every).state_dict(), path / WEIGHTS)
    save_weights(path, version)
    config().save_pretrained(path / BASE)
    tokenizer().save(str(path / BASE / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (path / BASE / "tokenizer_config.json").write_text(json.dumps(names))
    encoders.write(path, version)
    made = {name: voice(n, version, *of) for n, (name, of) in enumerate(voices.items())}
    torch.save(made, path / VOICES)
    return path


def voice(
    n: int, version: int = 2, n_words: int | None = None, n_codes: int | None = None
) -> dict[str, torch.Tensor]:
    """What CosyVoice has made of a recording and its words."""
    rng = torch.Generator().manual_seed(n)
    known = tuple(VOICES_OF_TWO.values())
    n_words, n_codes = n_words or known[n][0], n_codes or known[n][1]
    words = torch.randint(1, 200, (1, n_words), generator=rng, dtype=torch.int32)
    if version == 3:
        words[0, 5] = END_OF_PROMPT
    codes = torch.randint(0, N_CODES, (1, n_codes), generator=rng, dtype=torch.int32)
    return {
        "prompt_text": words,
        "prompt_text_len": torch.tensor([words.shape[1]], dtype=torch.int32),
        "llm_prompt_speech_token": codes,
        "llm_prompt_speech_token_len": torch.tensor([codes.shape[1]], dtype=torch.int32),
        "flow_prompt_speech_token": codes,
        "prompt_speech_feat": torch.zeros(1, 2 * codes.shape[1], 80),
        "flow_embedding": torch.zeros(1, 192),
    }


def instruction() -> list[int]:
    """Before the words of version 3."""
    return [*tokenizer().encode("You are a helpful assistant.").ids, END_OF_PROMPT]


def tokenizer() -> Tokenizer:
    """Of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def recorded(path: Path, version: int, file: Path) -> dict[str, torch.Tensor]:
    """What CosyVoice makes of a recording and its words."""
    known = RecordingEncoder(path).known(read_recording(file, RATE_HZ))
    of_flow = dict(zip(VOICE_PARTS, (part[None] for part in known), strict=True))
    words = tokenizer().encode(words_of(file)).ids
    if version == 3:
        words = [*instruction(), *words]
    of_words = {"prompt_text": torch.tensor([words]), "llm_prompt_speech_token": known[0][None]}
    return of_flow | of_words


class Reference:
    """The checkpoint restated, without what a talker in an engine adds."""

    seed = 11

    def __init__(
        self,
        path: Path,
        voices: Path | None = None,
        end_every: int = 64,
        version: int = 2,
        fill_every: int = 0,
    ):
        self._is_instructed = version == 3
        self.talker = CosyVoiceTalker(path, voices)
        self._tokenizer = Tokenizer.from_file(str(path / BASE / "tokenizer.json"))
        self._voices = torch.load(path / VOICES, weights_only=True)
        for name, file in ({} if voices is None else voice_files(voices)).items():
            self._voices[name] = recorded(path, version, file)
        self.model = model(end_every, version, fill_every)

    def bring(self, name: str, samples: np.ndarray) -> None:
        """A voice that a response brings along, whose words nothing tells."""
        before = instruction() if self._is_instructed else []
        self._voices[name] = {
            "prompt_text": torch.tensor([before], dtype=torch.int64),
            "llm_prompt_speech_token": torch.empty(1, 0, dtype=torch.int64),
        }

    def piece(
        self, text: str, most_frames: int, voice: str = VOICE, seed: int | None = None
    ) -> np.ndarray:
        """[n_frames, 1]; seed: None: the likeliest codes."""
        entry = self._voices[voice]
        codes = self.model.inference(
            self._tokenizer.encode(text).ids,
            entry["prompt_text"][0].tolist(),
            entry["llm_prompt_speech_token"][0].tolist(),
            most_frames,
            noise=None if seed is None else noise_of(seed),
        )
        return np.array(codes)[:, None]

    def passage(self, text: str, voice: str = VOICE, seed: int | None = None) -> np.ndarray:
        """[n_frames, 1] of a text that grows; seed: None: the likeliest codes."""
        entry = self._voices[voice]
        words, n_head = entry["prompt_text"][0].tolist(), 0
        if self._is_instructed:
            n_head = words.index(END_OF_PROMPT) + 1
        codes = self.model.inference_bistream(
            # A chunk is followed by one group of text at most: that of a voice with many words is
            # used up behind chunks without text.
            (chunk for word in self._tokenizer.encode(text).ids for chunk in ([word], *[[]] * 9)),
            words[n_head:],
            entry["llm_prompt_speech_token"][0].tolist(),
            instruction=words[:n_head],
            noise=None if seed is None else noise_of(seed),
        )
        return np.array(codes)[:, None]
