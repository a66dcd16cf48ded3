"""A tiny random MOSS-TTS in the published layout, its codec, and their reference.

Its weights are made so that, as a trained model, it ends its pieces: what the embedding of some
codes says of the end, no layer changes, and the head of text reads it.
"""

import copy
import json
from functools import cache
from pathlib import Path

import numpy as np
import soundfile as sf
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config

from sglang_live.models.moss_tts.family import CODEC_FOLDER, VOICE
from sglang_live.models.moss_tts.parts import MossTalker
from sglang_live.models.voice_files import read_recording, voice_files
from test.moss_tts.reference import Codec, MossTTS

N_BOOKS, CODES, HIDDEN, TEXT_VOCAB = 4, 64, 64, 320
SAMPLES_PER_FRAME = 1920
RECORDED = 60_000  # samples
N_IDS = (N_BOOKS + 1) * (CODES + 1)
_MARKS = ("im_start", "im_end", "audio_start", "audio_end", "audio_assistant_gen_slot")
_SLOTS = ("audio_assistant_delay_slot", "audio_user_slot")
IDS = {name: 256 + n for n, name in enumerate((*_MARKS, *_SLOTS))}
# A dimension that says that this is the last code; in embedding and head what no other outweighs.
_LAST, _CLEAR = 0, 3.0


def _stage(width: int, out: int, heads: int, width_in: int | None = None) -> dict:
    return {
        "module_type": "Transformer",
        "input_dimension": width_in or width,
        "output_dimension": out,
        "d_model": width,
        "num_heads": heads,
        "num_layers": 2,
        "dim_feedforward": 2 * width,
        "causal": True,
        "norm": "layer_norm",
        "positional_embedding": "rope",
        "max_period": 10_000,
        "gating": "none",
        "layer_scale": 0.01,
        "conv_layout": True,
    }


# The published codec's shape with fewer stages and channels, and a window of 13 frames.
CODEC = {
    "model_type": "moss-audio-tokenizer",
    "architectures": ["MossAudioTokenizerModel"],
    "sampling_rate": 24_000,
    "downsample_rate": SAMPLES_PER_FRAME,
    "causal_transformer_context_duration": 1.04,
    "quantizer_kwargs": {
        "num_quantizers": N_BOOKS + 1,
        "codebook_size": CODES,
        "codebook_dim": 8,
        "rvq_dim": 16,
        "input_dim": 24,
        "output_dim": 24,
        "quantizer_type": "rlfq",
    },
    "encoder_kwargs": [
        {"module_type": "PatchedPretransform", "patch_size": 960},
        _stage(24, 48, 2, width_in=960),
        {"module_type": "PatchedPretransform", "patch_size": 2},
        _stage(32, 24, 4, width_in=96),
    ],
    "decoder_kwargs": [
        _stage(32, 48, 4, width_in=24),
        {"module_type": "PatchedPretransform", "patch_size": 2},
        _stage(24, 960, 2),
        {"module_type": "PatchedPretransform", "patch_size": 960},
    ],
}


def config() -> dict:
    qwen3 = Qwen3Config(
        vocab_size=TEXT_VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
    )
    return {
        "model_type": "moss_tts_delay",
        "architectures": ["MossTTSDelayModel"],
        "dtype": "float32",
        "language_config": json.loads(qwen3.to_json_string()),
        "n_vq": N_BOOKS,
        "audio_vocab_size": CODES,
        "audio_pad_code": CODES,
        "pad_token_id": 0,
        **{f"{name}_token_id": token for name, token in IDS.items()},
    }


@cache
def model(end_every: int) -> MossTTS:
    torch.manual_seed(5)
    made = MossTTS(config()).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1:
                weight.uniform_(0.7, 1.3, generator=rng)
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    weight *= 2
            else:
                scale = 1.0 if "emb" in name else 2.0 * weight.shape[-1] ** -0.5
                weight.normal_(0, scale, generator=rng)
        _tell_end(made, end_every)
    return made


def _tell_end(model: MossTTS, end_every: int) -> None:
    goes_on, ends = IDS["audio_assistant_gen_slot"], IDS["audio_assistant_delay_slot"]
    text = model.language_model.embed_tokens.weight
    text *= 3  # among the marks of all books
    text[[goes_on, ends]] *= 0.1  # equal in all steps
    text[:, _LAST] = -_CLEAR
    for table in model.emb_ext:
        table.weight[:, _LAST] = 0.0
    model.emb_ext[0].weight[2:CODES:end_every, _LAST] = 2 * _CLEAR
    for head in model.lm_heads:
        head.weight[:, _LAST] = 0.0
    model.lm_heads[0].weight[[goes_on, ends]] = 0.0
    model.lm_heads[0].weight[ends, _LAST] = 2 * _CLEAR
    for layer in model.language_model.layers:
        layer.self_attn.o_proj.weight[_LAST] = 0.0
        layer.mlp.down_proj.weight[_LAST] = 0.0


def build(path: Path, *, end_every: int = 64, **changes) -> Path:
    """Returns the checkpoint's directory.

    end_every: frames of a piece on average; about.
    changes: of config.json.
    """
    path.mkdir(exist_ok=True)
    _save(model(end_every), config() | changes, path)
    _save(codec(), CODEC, path / CODEC_FOLDER)
    _tokenizer().save(str(path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def _save(module: torch.nn.Module, settings: dict, path: Path) -> None:
    path.mkdir(exist_ok=True)
    save_file(dict(module.state_dict()), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(settings))


@cache
def codec() -> Codec:
    """A random codec in which every path matters; its wave has an rms of about 0.2."""
    torch.manual_seed(0)
    module = Codec(CODEC).eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("scale"):
                weight.uniform_(0.1, 0.4, generator=rng)
            elif "norm" in name and weight.dim() == 1:
                weight.uniform_(0.7, 1.3, generator=rng)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5, generator=rng)
        last = module.decoder[-2].output_proj.weight
        last.mul_(0.2 / module.decode(random_codes(12)).std())
        x = 0.2 * torch.randn(12 * SAMPLES_PER_FRAME, 1, generator=rng)
        for stage in module.encoder:
            x = stage(x)
        module.encoder[-1].output_proj.weight.mul_(3.0 / x.std())
    return module


def random_codes(n_frames: int, seed: int = 1) -> torch.Tensor:
    """[n_frames, N_BOOKS]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, CODES, (n_frames, N_BOOKS), generator=rng)


def decoded(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[n_samples] of codes [n_frames, N_BOOKS], by the reference."""
    return copy.deepcopy(codec()).to(dtype).decode(codes)


def encoded(samples: torch.Tensor) -> torch.Tensor:
    """[n_frames, N_BOOKS] of whole frames, as loud as the reference's processor makes them."""
    loudness_db = 10 * torch.log10(torch.mean(samples**2) + 1e-9)
    gain_db = max(-3.0, min(-20 - float(loudness_db), 3.0))
    return codec().encode(samples * 10 ** (gain_db / 20), N_BOOKS)


def recordings(folder: Path) -> Path:
    """A directory with one recording, which is no whole number of frames."""
    sound = 0.2 * np.random.default_rng(3).standard_normal(RECORDED)
    sf.write(folder / "anna.wav", sound, 24_000, subtype="FLOAT")
    return folder


# At the server's rate.
heard = decoded


class Reference:
    """The checkpoint restated, without what a talker in an engine adds."""

    def __init__(self, path: Path, voices: Path | None = None, end_every: int = 64):
        self.talker = MossTalker(path, voices)
        self._recordings = {} if voices is None else voice_files(voices)
        self.model = model(end_every)

    def piece(self, text: str, most_frames: int, voice: str = VOICE) -> np.ndarray:
        """[n_frames, N_BOOKS] as the reference's processor finds them, before it decodes."""
        ids = [token - N_IDS for token in self.talker.prompt(voice, text)]
        rows, said = [n for n, token in enumerate(ids) if token >= TEXT_VOCAB], None
        if rows:
            for n in rows:
                ids[n] = IDS["audio_user_slot"]
            samples = torch.from_numpy(read_recording(self._recordings[voice], 24_000))
            whole = len(samples) // SAMPLES_PER_FRAME * SAMPLES_PER_FRAME
            said = rows[0], encoded(samples[:whole])
        steps = self.model.generate(ids, most_frames + N_BOOKS, said)
        if steps[-1, 0] == IDS["audio_end"]:
            steps = steps[:-1]
        n_frames = len(steps) - N_BOOKS + 1
        books = [steps[book : n_frames + book, book + 1] for book in range(N_BOOKS)]
        return torch.stack(books, dim=1).numpy()


def _tokenizer() -> Tokenizer:
    """Of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in IDS])
    return tokenizer
