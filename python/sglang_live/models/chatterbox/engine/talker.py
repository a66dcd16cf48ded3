"""T3 as an SGLang model: a Llama that is guided by a second prompt, in which the text is silent.

Places of the text and of the speech have learned embeddings, beside the rotation.
"""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from torch import Tensor, nn

from sglang_live.models.chatterbox.encoder import RecordingEncoder
from sglang_live.models.chatterbox.family import BEGIN_ID, END_ID, N_CODES, is_recording
from sglang_live.models.chatterbox.voices import COND, TABLES, read_voice, voice_rows
from sglang_live.models.codecs.flow import RECORDING_RATE_HZ
from sglang_live.models.host_copy import copy_to
from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.engine.pair import PairLayer, guided
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.speech_lm.sampler import Repetition, Sampler
from sglang_live.models.speech_lm.talker_state import TalkerStream
from sglang_live.models.voice_files import read_recording

# Reference settings (ChatterboxTTS.generate). There 0 is no guidance, here 1.
GUIDANCE, MIN_P = 0.5 + 1.0, 0.05

_CODES = "speech_emb.weight"
_RENAMED = (
    ("tfmr.layers.", "model.layers."),
    (".self_attn.", ".mixer."),
    (".input_layernorm.", ".norm."),
    (".post_attention_layernorm.", ".norm2."),
    ("tfmr.norm.", "model.norm."),
    (_CODES, "model.embed_tokens.weight"),
    ("speech_head.", "codec_head."),
)
# The Llama has a table that nothing reads; the head of text is for training.
_UNUSED = "tfmr.embed_tokens.weight", "text_head.weight"


class T3Model(nn.Module):
    """
    text_places, speech_places: [n_places, hidden].
    """

    def __init__(self, config, quant_config):
        super().__init__()
        self._text = range(config.vocab_size, config.vocab_size + config.text_vocab_size)
        self._first_place = config.n_voice_rows
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        new_norm = partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            PairLayer(config, n, quant_config, new_norm) for n in range(config.num_hidden_layers)
        )
        self.norm = new_norm()
        for name, n in (("text", config.n_text_places), ("speech", config.n_speech_places)):
            places = torch.empty(n, config.hidden_size)
            self.register_buffer(f"{name}_places", places, persistent=False)

    def of_text(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are of a text, [n, 1] bool, and embeddings of their places [n, hidden]."""
        is_text = (input_ids >= self._text.start) & (input_ids < self._text.stop)
        at = (positions - self._first_place).clamp(0, len(self.text_places) - 1)
        return is_text.unsqueeze(1), self.text_places[at]

    def forward(self, input_ids, positions, forward_batch, embeds: Tensor) -> Tensor:
        others = embeds
        if not forward_batch.forward_mode.is_decode():
            others = torch.where(*self.of_text(input_ids, positions), embeds)
        hidden, positions = torch.cat((embeds, others)), positions.repeat(2)
        for layer in self.layers:
            hidden = layer(positions, hidden, forward_batch)
        return guided(self.norm(hidden), GUIDANCE)


class ChatterboxT3(FrameLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(
            config,
            T3Model(config, quant_config),
            n_codes=1,
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(min_p=MIN_P, repetition=Repetition()),
            # The reference leaves them out of the sound.
            excluded=[n for n in range(N_CODES, config.vocab_size) if n != END_ID],
        )

    def _embed_frames(self, codes: Tensor) -> Tensor:
        embeds: Tensor = self.model.embed_tokens(codes[:, 0])
        return embeds

    def _others(self, first: Tensor, hidden: Tensor, greedy: Tensor, draws: Tensor) -> Tensor:
        return first.new_empty(len(first), 0)

    def _ends(self, codes: Tensor) -> Tensor:
        return codes[:, 0] == END_ID

    # --- places ---

    def _embed_last_frames(self, rows: Tensor, frame: Tensor) -> Tensor:
        return super()._embed_last_frames(rows, frame) + self._places(frame)

    def _embed_extend(self, input_ids: Tensor, forward_batch) -> Tensor:
        embeds = super()._embed_extend(input_ids, forward_batch)
        is_text, places = self.model.of_text(input_ids, forward_batch.positions)
        return embeds + places * is_text

    def _place_frames(self, out: Tensor, stream: TalkerStream, prefix: int) -> None:
        super()._place_frames(out, stream, prefix)
        first = max(stream.prompt_len - prefix, 0)
        frames = [stream.frame_at(place) for place in range(prefix + first, prefix + len(out))]
        out[first:] += self._places(copy_to(torch.tensor(frames), out.device) + 1)

    def _places(self, at: Tensor) -> Tensor:
        """The mark before the first frame is at 0."""
        places: Tensor = self.model.speech_places[at.clamp(max=len(self.model.speech_places) - 1)]
        return places

    # --- weights ---

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params, tables = dict(self.named_parameters()), self._tables()
        known, loaded, of_voices = {*params, *tables}, Counter[str](), dict[str, Tensor]()
        for name, tensor in weights:
            if name.startswith((COND, *TABLES)):
                of_voices[name.removeprefix(COND)] = tensor.float().cpu()
            if name.startswith(COND) or name in _UNUSED:
                continue
            if name in tables:
                tables[name].copy_(tensor)
                target = name
            else:
                target = name
                for old, new in _RENAMED:
                    target = target.replace(old, new)
                target = load_llama_weight(params, target, tensor)
            if target not in known:
                raise ValueError(f"unknown weight {name} of Chatterbox")
            loaded[target] += 1
        if names := lacking(known, loaded):
            raise ValueError(f"checkpoint lacks weights of Chatterbox: {names[:8]}")
        self._fill_voices(of_voices)
        self.prepare()

    def _tables(self) -> dict[str, Tensor]:
        """Of embeddings that are no parameters."""
        return {
            "text_emb.weight": self.text_table,
            "text_pos_emb.emb.weight": self.model.text_places,
            "speech_pos_emb.emb.weight": self.model.speech_places,
        }

    def _fill_voices(self, tensors: dict[str, Tensor]) -> None:
        """The mark with which speech begins, and the voices behind it."""
        encoder = RecordingEncoder(Path(self.config.live_checkpoint))
        rows = [(tensors[_CODES][BEGIN_ID] + tensors["speech_pos_emb.emb.weight"][0])[None]]
        try:
            for file in map(Path, self.config.live_voices):
                if is_recording(file):
                    voice = encoder.voice(read_recording(file, RECORDING_RATE_HZ))
                else:
                    voice = read_voice(file)
                rows.append(voice_rows(voice, tensors))
        except KeyError as error:
            raise ValueError(f"checkpoint lacks weights of Chatterbox: {error}") from error
        self.voices.copy_(torch.cat(rows).to(self.voices.device, self.voices.dtype))


EntryClass = ChatterboxT3
