"""A tiny random CSM in the layout of transformers, with Mimi in it, and its reference.

Its weights are made so that, as a trained model, it ends its pieces: what the embedding of some
codes says of the end, no layer changes, and the heads read it.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CsmConfig, CsmForConditionalGeneration

from sglang_live.models.csm.family import BEGIN_OF_TEXT, END_OF_TEXT
from sglang_live.models.csm.parts import CsmTalker
from sglang_live.models.voice_files import read_recording, voice_files
from test.mimi import tiny as tiny_mimi

N_CODES, CODES = tiny_mimi.N_QUANTIZERS, tiny_mimi.CODEBOOK_SIZE
VOCAB, TEXT_VOCAB, HIDDEN, DEPTH_HIDDEN = CODES + 3, 320, 64, 32
MARKS = [CODES, CODES + 1, CODES + 2]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "high_freq_factor": 0.5,
    "low_freq_factor": 0.125,
}
# Dimensions that say: the frame is the last one; this code, or the one before it, is of the end.
_LAST, _OF_END = 0, 1
# In embedding and head: what no other dimension outweighs.
_CLEAR = 12.0


def config() -> CsmConfig:
    depth = {
        "num_codebooks": N_CODES,
        "backbone_hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "hidden_size": DEPTH_HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": N_CODES + 1,
        "rope_parameters": _LLAMA3
        | {
            "high_freq_factor": 0.0078125,
            "low_freq_factor": 0.001953125,
            "original_max_position_embeddings": 16,
        },
    }
    return CsmConfig(
        num_codebooks=N_CODES,
        vocab_size=VOCAB,
        text_vocab_size=TEXT_VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters=_LLAMA3 | {"original_max_position_embeddings": 1024},
        codebook_pad_token_id=MARKS[-1],
        codebook_eos_token_id=0,
        bos_token_id=1,
        pad_token_id=2,
        audio_token_id=3,
        audio_eos_token_id=4,
        depth_decoder_config=depth,
        codec_config=dict(tiny_mimi.CONFIG),
    )


def build(path: Path, *, end_every: int = 64, as_published: bool = True, **changes) -> Path:
    """Returns the checkpoint's directory.

    end_every: frames of a piece on average; about.
    as_published: with the names of files of sesame/csm-1b, where the usual name has other weights.
    changes: of config.json.
    """
    torch.manual_seed(5)
    model = CsmForConditionalGeneration(config()).eval()
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("codec_model."):
                continue
            if weight.dim() == 1:
                weight.uniform_(0.7, 1.3, generator=rng)
            else:
                n_in = (
                    weight.shape[-2] if name.endswith("codebooks_head.weight") else weight.shape[-1]
                )
                scale = 1.0 if "embed" in name and "proj" not in name else 2.0 * n_in**-0.5
                weight.normal_(0, scale, generator=rng)
        _tell_end(model, end_every)
        table = model.backbone_model.embed_tokens.embed_audio_tokens.weight
        model.depth_decoder.model.embed_tokens.weight.copy_(table)
    tiny_mimi.randomise(model.codec_model)
    model.save_pretrained(path, max_shard_size="200KB" if as_published else "5GB")
    file = path / "config.json"
    settings = json.loads(file.read_text())
    if as_published:
        _rename_shards(path)
        settings["transformers_weights"] = "transformers.safetensors.index.json"
    file.write_text(json.dumps(settings | changes))
    _tokenizer().save(str(path / "tokenizer.json"))
    names = {"bos_token": BEGIN_OF_TEXT, "eos_token": END_OF_TEXT}
    names["tokenizer_class"] = "PreTrainedTokenizerFast"
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def _tell_end(model: CsmForConditionalGeneration, end_every: int) -> None:
    told = [_LAST, _OF_END]
    tables = model.backbone_model.embed_tokens.embed_audio_tokens.weight.view(N_CODES, VOCAB, -1)
    tables[..., told] = 0.0
    tables[0, 1:CODES:end_every, _LAST] = _CLEAR
    tables[:, 0, _OF_END] = _CLEAR
    model.embed_text_tokens.weight[:, told] = 0.0
    model.lm_head.weight[:, told] = 0.0
    model.lm_head.weight[0] = 0.0
    model.lm_head.weight[0, _LAST] = 2 * _CLEAR
    depth = model.depth_decoder
    heads = depth.codebooks_head.weight  # [n_codes - 1, hidden, vocab]
    heads[:, told] = 0.0
    heads[:, :, 0] = 0.0
    heads[:, _OF_END, 0] = 2 * _CLEAR
    projection = depth.model.inputs_embeds_projector.weight
    projection[told] = 0.0
    projection[:, told] = 0.0
    projection[_OF_END, _OF_END] = 1.0
    for layer in [*model.backbone_model.layers, *depth.model.layers]:
        layer.self_attn.o_proj.weight[told] = 0.0
        layer.mlp.down_proj.weight[told] = 0.0


def _rename_shards(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    for file in set(document["weight_map"].values()):
        (path / file).rename(path / file.replace("model-", "transformers-"))
    names = {k: v.replace("model-", "transformers-") for k, v in document["weight_map"].items()}
    renamed = document | {"weight_map": names}
    (path / "transformers.safetensors.index.json").write_text(json.dumps(renamed))
    index.unlink()
    save_file({"text_embeddings.weight": torch.zeros(1)}, path / "model.safetensors")


class Reference:
    """The checkpoint in transformers, without what a talker in an engine adds."""

    def __init__(self, path: Path, voices: Path | None = None):
        self.talker = CsmTalker(path, voices)
        self._recordings = {} if voices is None else voice_files(voices)
        self.model = CsmForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()

    def codes(self, text_ids: list[int], most_frames: int, sound: torch.Tensor | None = None):
        """[n_frames, N_CODES] of one piece, the most likely ones.

        Args:
            text_ids: of the prompt, with audio_token_id in the place of each frame of `sound`.
        """
        heard = {}
        if sound is not None:
            heard = {
                "input_values": sound[None, None],
                "input_values_cutoffs": torch.tensor([[len(sound)]]),
            }
        # Marks are no codes: Mimi has no entry for them.
        frames = self.model.generate(
            torch.tensor([text_ids]),
            do_sample=False,
            max_new_tokens=most_frames,
            suppress_tokens=MARKS,
            depth_decoder_do_sample=False,
            depth_decoder_suppress_tokens=MARKS,
            **heard,
        )[0]
        ends = (frames[:, :-1] == 0).all(dim=1).nonzero().flatten().tolist()
        return frames[: ends[0] if ends else most_frames].numpy()

    def piece(self, text: str, most_frames: int, voice: str = "0") -> np.ndarray:
        """As codes(), with the prompt of the talker and the recording of the voice."""
        ids = [token - VOCAB for token in self.talker.prompt(voice, text)]
        rows = [n for n, token in enumerate(ids) if token >= TEXT_VOCAB]
        for n in rows:
            ids[n] = self.model.config.audio_token_id
        sound = None
        if rows:
            ids[rows[-1]] = self.model.config.audio_eos_token_id
            samples = torch.from_numpy(read_recording(self._recordings[voice], 24_000))
            # transformers fills up the last frame inside of its layers, not in the sound.
            n_missing = -len(samples) % tiny_mimi.SAMPLES_PER_FRAME
            sound = torch.nn.functional.pad(samples, (0, n_missing))
        return self.codes(ids, most_frames, sound)

    def wave(self, codes: np.ndarray) -> torch.Tensor:
        return tiny_mimi.decoded(self.model.codec_model, torch.from_numpy(codes))


def _tokenizer() -> Tokenizer:
    """Of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [BEGIN_OF_TEXT, END_OF_TEXT]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return tokenizer
