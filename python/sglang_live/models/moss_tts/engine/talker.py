"""MOSS-TTS as an SGLang model: a Qwen3 draws a code of each book, and whether audio goes on.

The reference draws text in a channel beside the books. While it speaks only two ids of it are
possible, the slots, one for the steps of audio and one that begins the end: these are a head here.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.qwen3 import Qwen3Model
from torch import Tensor

from sglang_live.models.moss_tts.encoder import MossEncoder
from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.speech_lm.engine.delay_lm import DelayLM
from sglang_live.models.speech_lm.engine.steps import all_greedy
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.speech_lm.sampler import Sampler, draws_of
from sglang_live.models.voice_files import read_recording

# Reference settings (MossTTSDelayModel.generate). A request's temperature is for codes.
TOP_K, TOP_P = 25, 0.8
SLOT_TEMPERATURE = 1.5
GOES_ON, ENDS = 0, 1
# Separates the noise of slots from that of codes.
_SLOT_SALT = 0x2545F4914F6CDD1D

_TABLES = "model.embed_tokens.weight"
_HEADS = "codec_head.weight"


class MossBackbone(DelayLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        n_books, mark = config.n_books, config.n_codes
        size = mark + 1
        marks = [book * size + mark for book in range(n_books)]
        super().__init__(
            config,
            Qwen3Model(config, quant_config, prefix="model"),
            delay=Delay(n_books=n_books, n_codes=mark, begin_id=mark, end_id=mark),
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(top_k=TOP_K, top_p=TOP_P),
            excluded=[*marks, *range(n_books * size + len(config.slots), (n_books + 1) * size)],
            n_others=1,
        )
        self._of_slots = Sampler()

    def _chosen(self, logits: Tensor, rows: Tensor, frame: Tensor, history: Tensor) -> Tensor:
        codes = super()._chosen(logits, rows, frame, history)
        slots, greedy = logits[:, -1, : len(self.config.slots)], self.rows.greedy[rows]
        if all_greedy(greedy):
            slot = slots.argmax(dim=-1)
        else:
            draw = draws_of(self.rows.seed[rows] ^ _SLOT_SALT, frame, 1)[:, 0]
            slot = self._of_slots.choose(slots, SLOT_TEMPERATURE, greedy, draw)
        # Audio has one step at least, and its end goes on.
        slot = torch.where(frame == 0, GOES_ON, slot)
        slot = torch.where(self._n_ending(history) > 0, ENDS, slot)
        return torch.cat((codes[:, :-1], slot.unsqueeze(1)), dim=1)

    def _n_ending(self, history: Tensor) -> Tensor:
        return (history[:, -self.delay.n_books :, -1] == ENDS).sum(dim=1)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params = dict(self.named_parameters())
        size, n_books = self.config.n_codes + 1, self.config.n_books
        shape = (self.config.vocab_size, self.config.hidden_size)
        whole = {name: torch.zeros(shape, dtype=params[name].dtype) for name in (_TABLES, _HEADS)}
        loaded, n_parts = Counter[str](), Counter[str]()
        for name, tensor in weights:
            target, book = self._place_of(name)
            if target in whole:
                rows = tensor if book < n_books else tensor[self.config.slots]
                whole[target][book * size : book * size + len(rows)] = rows
                n_parts[target] += 1
                if name == "language_model.embed_tokens.weight":
                    self.text_table.copy_(tensor)
            elif (target := load_llama_weight(params, target, tensor)) in params:
                loaded[target] += 1
            else:
                raise ValueError(f"unknown weight {name} of MOSS-TTS")
        for name, table in whole.items():
            if n_parts[name] == n_books + 1:
                loader = getattr(params[name], "weight_loader", default_weight_loader)
                loader(params[name], table)
                loaded[name] += 1
        if names := lacking(params, loaded):
            raise ValueError(f"checkpoint lacks weights of MOSS-TTS: {names[:8]}")
        self._fill_voices()
        # A text has the mark in the place of each book's code.
        marks = whole[_TABLES][: n_books * size].view(n_books, size, -1)[:, -1].sum(dim=0)
        self.text_table += marks.to(self.text_table.device, self.text_table.dtype)
        self.prepare()

    def _fill_voices(self) -> None:
        """The steps of the recordings, each with the slot of what a user has said."""
        files = [Path(file) for file in self.config.live_recordings]
        if not files:
            return
        encoder, steps = MossEncoder(Path(self.config.live_checkpoint)), []
        for file in files:
            samples = torch.from_numpy(read_recording(file, encoder.sample_rate_hz))
            whole = len(samples) // encoder.samples_per_frame * encoder.samples_per_frame
            # Without the frames of marks.
            steps.append(self.delay.steps(encoder.encode(samples[:whole]))[1:-1])
        device, size = self.voices.device, self.config.n_codes + 1
        offset = torch.arange(self.config.n_books, device=device) * size
        embeds = self.model.embed_tokens(torch.cat(steps).to(device) + offset).sum(dim=1)
        self.voices.copy_(embeds + self.text_table[self.config.user_slot])

    def _place_of(self, name: str) -> tuple[str, int]:
        """The parameter of a weight, and the book if it is one of the books' weights; the slots
        are behind the last book."""
        kind, _, rest = name.partition(".")
        slots = self.config.n_books
        if name == "language_model.embed_tokens.weight":
            return _TABLES, slots
        if kind == "emb_ext":
            return _TABLES, int(rest.removesuffix(".weight"))
        if kind == "lm_heads":
            head = int(rest.removesuffix(".weight"))
            return _HEADS, head - 1 if head else slots
        return name.replace("language_model.", "model.", 1), 0


EntryClass = MossBackbone
