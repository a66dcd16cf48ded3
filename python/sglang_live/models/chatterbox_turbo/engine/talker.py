"""T3 of Turbo as an SGLang model: a GPT-2 with embeddings of its own, and SGLang's layers.

In a prompt, ids below the number of codes and marks are those of a voice's recording, and the mark
with which speech begins.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.gpt2 import GPT2Block
from torch import Tensor, nn

from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import END_ID, N_CODES, is_recording
from sglang_live.models.chatterbox.voices import SPEAKER_LAYER, read_voice
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.sampler import Repetition, Sampler
from sglang_live.models.voice_files import read_recording

# Reference settings (ChatterboxTurboTTS.generate).
TOP_K, TOP_P = 1000, 0.95

_RENAMED = (
    ("tfmr.", "model."),
    ("speech_emb.", "model.embed_tokens."),
    ("speech_head.weight", "codec_head.weight"),
)
_TEXT, _BIAS = "text_emb.weight", "speech_head.bias"
# A table and masks that nothing reads; the head of text is for training.
_UNUSED = "tfmr.wte.weight", "text_head.weight"
_MASKS = ".attn.bias", ".attn.masked_bias"
# Their weights are stored as those of a convolution.
_TRANSPOSED = "c_attn.weight", "c_proj.weight", "c_fc.weight"


class TurboModel(nn.Module):
    def __init__(self, config, quant_config):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(
            GPT2Block(n, config, quant_config=quant_config, prefix=f"model.h.{n}")
            for n in range(config.num_hidden_layers)
        )
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, input_ids, positions, forward_batch, embeds: Tensor) -> Tensor:
        # Rows that pad a captured batch have any position.
        hidden = embeds + self.wpe(positions.clamp(max=self.wpe.num_embeddings - 1))
        for layer in self.h:
            hidden = layer(hidden, forward_batch)
        return self.ln_f(hidden)


class ChatterboxTurboT3(FrameLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            TurboModel(config, quant_config),
            n_codes=1,
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(top_k=TOP_K, top_p=TOP_P, repetition=Repetition(), penalised_last=True),
            # The reference leaves them out of the sound.
            excluded=[n for n in range(N_CODES, config.vocab_size) if n != END_ID],
        )

    def _embed_frames(self, codes: Tensor) -> Tensor:
        embeds: Tensor = self.model.embed_tokens(codes[:, 0])
        return embeds

    def _embed_prompt(self, ids: Tensor) -> Tensor:
        n_ids = self.config.vocab_size
        codes = self.model.embed_tokens(ids.clamp(max=n_ids - 1))
        return torch.where((ids < n_ids).unsqueeze(1), codes, super()._embed_prompt(ids))

    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        return first.new_empty(len(first), 0)

    def _ends(self, codes: Tensor) -> Tensor:
        return codes[:, 0] == END_ID

    # --- weights ---

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params = dict(self.named_parameters())
        known, loaded = {*params, _TEXT, _BIAS}, Counter[str]()
        speaker: dict[str, Tensor] = {}
        for name, tensor in weights:
            if name in _UNUSED or name.endswith(_MASKS):
                continue
            if name.startswith(SPEAKER_LAYER):
                speaker[name.removeprefix(SPEAKER_LAYER)] = tensor.float().cpu()
                continue
            target = name
            for old, new in _RENAMED:
                target = target.replace(old, new)
            if name == _TEXT:
                self.text_table.copy_(tensor)
            elif name == _BIAS:
                self.allowed += tensor.to(self.allowed)
            elif target in params:
                param = params[target]
                loader = getattr(param, "weight_loader", default_weight_loader)
                loader(param, tensor.t() if target.endswith(_TRANSPOSED) else tensor)
            else:
                raise ValueError(f"unknown weight {name} of Chatterbox Turbo")
            loaded[target] += 1
        lack = sorted(known - loaded.keys())
        lack += [SPEAKER_LAYER + name for name in ("weight", "bias") if name not in speaker]
        if lack:
            raise ValueError(f"checkpoint lacks weights of Chatterbox Turbo: {lack[:8]}")
        encoder, speakers = RecordingEncoder(Path(self.config.live_checkpoint)), []
        for file in map(Path, self.config.live_voices):
            if is_recording(file):
                speakers.append(encoder.speaker(read_recording(file, RECORDING_RATE_HZ)))
            else:
                speakers.append(read_voice(file, has_emotion=False).speaker)
        rows = F.linear(torch.stack(speakers), **speaker)
        self.voices.copy_(rows.to(self.voices.device, self.voices.dtype))
        self.prepare()


EntryClass = ChatterboxTurboT3
