"""A tiny random Higgs Audio v2 in the layout of transformers, its codec, and their reference.

Its weights are made so that, as a trained model, it ends its pieces: what the embedding of some
codes says of the end, no layer changes, and the head of the first book reads it.
"""

import copy
import json
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2Processor,
    HiggsAudioV2TokenizerConfig,
)

from sglang_live.models.higgs_v2.family import CODEC_FOLDER, VOICE
from sglang_live.models.higgs_v2.parts import HiggsTalker
from sglang_live.models.voice_files import read_recording, voice_files

N_BOOKS, CODES = 4, 64
BEGIN_ID, END_ID, BOOK = CODES, CODES + 1, CODES + 2
HIDDEN, TEXT_VOCAB = 64, 320
SPECIAL = (
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|audio_out_bos|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
    "<|AUDIO_OUT|>",
    "<|reserved_special_token_6|>",
    "<|audio_eos|>",
)
IDS = {name: 256 + n for n, name in enumerate(SPECIAL)}
SAMPLES_PER_FRAME = 960
# A recording's samples, no whole number of frames, and its words.
RECORDED, ANNA_SAYS = 30_000, "This is what Anna said."
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 12.0
# The published codec's shape with fewer channels and books of 6 bits.
_CODEC = {
    "sample_rate": 24_000,
    "target_bandwidths": [0.3, 0.6],
    "codebook_size": CODES,
    "codebook_dim": 8,
    "acoustic_model_config": {
        "encoder_hidden_size": 4,
        "decoder_hidden_size": 96,
        "hidden_size": 16,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "upsampling_ratios": [8, 5, 4, 2, 3],
    },
    "semantic_model_config": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "conv_dim": [8] * 7,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
}


def config() -> HiggsAudioV2Config:
    return HiggsAudioV2Config(
        vocab_size=TEXT_VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        num_codebooks=N_BOOKS,
        codebook_size=BOOK,
        audio_stream_bos_id=BEGIN_ID,
        audio_stream_eos_id=END_ID,
        audio_token_id=IDS["<|AUDIO_OUT|>"],
        audio_bos_token_id=IDS["<|audio_out_bos|>"],
        audio_delay_token_id=IDS["<|reserved_special_token_6|>"],
        pad_token_id=0,
        bos_token_id=IDS["<|begin_of_text|>"],
        eos_token_id=IDS["<|eot_id|>"],
    )


def model(end_every: int) -> HiggsAudioV2ForConditionalGeneration:
    """end_every: see build."""
    torch.manual_seed(5)
    made = HiggsAudioV2ForConditionalGeneration(config()).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.7, 1.3, generator=rng)
            else:
                scale = 1.0 if "embed" in name else 2.0 * weight.shape[-1] ** -0.5
                weight.normal_(0, scale, generator=rng)
        _tell_end(made, end_every)
    made.generation_config.eos_token_id = IDS["<|eot_id|>"]
    return made


def build(path: Path, *, end_every: int = 48, **changes) -> Path:
    """Returns the checkpoint's directory.

    end_every: frames of a piece on average; about.
    changes: of config.json.
    """
    reference = model(end_every)
    reference.save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    _tokenizer().save(str(path / "tokenizer.json"))
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    codec().save_pretrained(path / CODEC_FOLDER)
    return path


def _tell_end(model: HiggsAudioV2ForConditionalGeneration, end_every: int) -> None:
    tables = model.model.embed_audio_tokens.embed_audio_tokens.weight.view(N_BOOKS, BOOK, -1)
    tables[..., _LAST] = 0.0
    tables[0, 1:CODES:end_every, _LAST] = _CLEAR
    model.model.embed_tokens.weight[:, _LAST] = 0.0
    heads = model.audio_lm_head.weight.view(N_BOOKS, BOOK, -1)
    heads[..., _LAST] = 0.0
    heads[:, CODES:] = 0.0
    heads[0, END_ID, _LAST] = 2 * _CLEAR
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[_LAST] = 0.0
        layer.mlp.down_proj.weight[_LAST] = 0.0
        layer.audio_mlp.down_proj.weight[_LAST] = 0.0


@cache
def codec() -> Any:
    """A random codec in which every path matters; its wave has an rms of about 0.2."""
    # transformers imports it for resampling what it encodes.
    known = sys.modules.get("torchaudio")
    stand_in = types.ModuleType("torchaudio")
    stand_in.functional = types.SimpleNamespace(resample=_resample)
    sys.modules["torchaudio"] = stand_in
    try:
        from transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer import (
            HiggsAudioV2TokenizerModel,
        )
    finally:
        if known is None:
            del sys.modules["torchaudio"]
        else:
            sys.modules["torchaudio"] = known
    torch.manual_seed(0)
    module = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**_CODEC)).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            if name.endswith("alpha"):
                weight.uniform_(0.3, 1.5, generator=rng)
            elif name.startswith("acoustic_decoder") and weight.dim() == 3:
                weight.normal_(0, 1.2 * (weight[0].numel()) ** -0.5, generator=rng)
            elif name.startswith(("acoustic_decoder", "quantizer", "fc2")):
                weight.normal_(0, 0.3, generator=rng)
            elif name.startswith(("acoustic_encoder", "encoder_semantic", "fc.", "semantic_model")):
                weight.normal_(0, weight[0].numel() ** -0.5, generator=rng)
        sound = _decoded(module, random_codes(12))
        for last in (module.acoustic_decoder.conv2.weight, module.acoustic_decoder.conv2.bias):
            last.mul_(0.2 / sound.std())
    return module


def recordings(folder: Path) -> Path:
    """A directory with one recording, and its words."""
    rng = np.random.default_rng(3)
    sound = 0.2 * rng.standard_normal(RECORDED)
    sf.write(folder / "anna.wav", sound, 24_000, subtype="FLOAT")
    (folder / "anna.txt").write_text(f"{ANNA_SAYS}\n")
    return folder


def _resample(sound: torch.Tensor, from_hz: int, to_hz: int) -> torch.Tensor:
    """[1, 1, n]; compared with torchaudio's own in test/unit/models/test_higgs_v2.py."""
    from sglang_live.models.higgs_v2.encoder import resampled

    return resampled(sound[0, 0], from_hz, to_hz)[None, None]


def encoded(samples: torch.Tensor) -> torch.Tensor:
    """[n_frames, N_BOOKS] of whole frames [n_samples], by the reference."""
    with torch.no_grad():
        return codec().encode(samples[None, None]).audio_codes[0].T


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    """[n_frames, N_BOOKS]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODES, (n_frames, N_BOOKS), generator=rng)


def decoded(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[n_samples] of codes [n_frames, N_BOOKS], by the reference."""
    return _decoded(copy.deepcopy(codec()).to(dtype), codes)


def _decoded(module: Any, codes: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module.decode(codes.T[None]).audio_values[0, 0]


# At the server's rate.
heard = decoded


class Reference:
    """The checkpoint in transformers, without what a talker in an engine adds."""

    def __init__(self, path: Path, voices: Path | None = None):
        self.talker = HiggsTalker(path, voices)
        self._recordings = {} if voices is None else voice_files(voices)
        self.model = HiggsAudioV2ForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32
        ).eval()

    def steps(
        self, text_ids: list[int], most_frames: int, said: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n_steps, N_BOOKS], the most likely ones, from the step of marks on.

        said: steps of a recording, at the ids of audio.
        """
        heard = {} if said is None else {"audio_input_ids": said[None]}
        if said is not None:
            heard["audio_input_ids_mask"] = torch.ones(1, len(said), dtype=torch.bool)
        found = self.model.generate(
            torch.tensor([text_ids]),
            do_sample=False,
            max_new_tokens=most_frames + N_BOOKS,
            **heard,
        )[0]
        return found if said is None else found[len(said) :]

    def piece(self, text: str, most_frames: int, voice: str = VOICE) -> np.ndarray:
        """[n_frames, N_BOOKS] as the reference's processor finds them, before it decodes."""
        ids = [token - N_BOOKS * BOOK for token in self.talker.prompt(voice, text)]
        rows = [n for n, token in enumerate(ids[:-1]) if token >= TEXT_VOCAB]
        for n in rows:  # as the reference's processor marks them
            is_last = n > rows[-1] - N_BOOKS + 1
            ids[n] = IDS["<|reserved_special_token_6|>" if is_last else "<|AUDIO_OUT|>"]
        said = self._said(voice) if rows else None
        # The model writes the step of marks by itself.
        steps = self.steps(ids[:-1], most_frames, said)
        assert (steps[0] == BEGIN_ID).all()
        ends = (steps == END_ID).all(dim=1).nonzero().flatten().tolist()
        steps = steps[1 : ends[0] if ends else len(steps)]
        n_frames = len(steps) - N_BOOKS + 1
        books = [steps[book : n_frames + book, book] for book in range(N_BOOKS)]
        return torch.stack(books, dim=1).clip(0, CODES - 1).numpy()

    def _said(self, voice: str) -> torch.Tensor:
        """[n_steps, N_BOOKS] of a recording, as the reference's processor has them."""
        samples = torch.from_numpy(read_recording(self._recordings[voice], 24_000))
        codes = encoded(samples[: len(samples) // SAMPLES_PER_FRAME * SAMPLES_PER_FRAME])
        marks = [torch.full((1, N_BOOKS), mark) for mark in (BEGIN_ID, END_ID)]
        frames = torch.cat((marks[0], codes, marks[1])).T[None]
        ids = types.SimpleNamespace(audio_stream_bos_id=BEGIN_ID, audio_stream_eos_id=END_ID)
        return HiggsAudioV2Processor.build_delay_pattern(ids, frames)[0].T

    def wave(self, codes: np.ndarray) -> torch.Tensor:
        return decoded(torch.from_numpy(codes))


def _tokenizer() -> Tokenizer:
    """Of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    return tokenizer
