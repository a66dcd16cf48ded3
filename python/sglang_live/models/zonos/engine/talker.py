"""Zonos as an SGLang model: a transformer that is guided by a second prompt."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import Tensor, nn

from sglang_live.models.speech_lm.delay import Delay
from sglang_live.models.speech_lm.engine.delay_lm import DelayLM
from sglang_live.models.speech_lm.engine.pair import PairLayer, guided
from sglang_live.models.speech_lm.engine.weights import lacking, load_llama_weight
from sglang_live.models.speech_lm.sampler import Repetition, Sampler
from sglang_live.models.zonos.conditions import Conditions
from sglang_live.models.zonos.family import N_BOOKS, N_CODES, PHONEMES, SPEAKER
from sglang_live.models.zonos.speaker import embeddings_of

# Reference settings (Zonos.generate, sample_from_logits).
GUIDANCE, MIN_P, PENALTY_WINDOW = 2.0, 0.1, 2
BOOK = N_CODES + 2

_TABLES, _HEADS = "model.embed_tokens.weight", "codec_head.weight"
_BOOKS = {"embeddings": _TABLES, "heads": _HEADS}


class ZonosModel(nn.Module):
    """
    untold: [n_rows, hidden], in the second prompt in the place of the table of voices.
    """

    def __init__(self, config, quant_config):
        super().__init__()
        self._first_row = config.vocab_size + config.text_vocab_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        new_norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(
            PairLayer(config, n, quant_config, new_norm, is_neox_style=False)
            for n in range(config.num_hidden_layers)
        )
        self.norm_f = new_norm()
        untold = torch.zeros(config.live_voice_rows, config.hidden_size)
        self.register_buffer("untold", untold, persistent=False)

    def forward(self, input_ids, positions, forward_batch, embeds: Tensor) -> Tensor:
        others = embeds
        if not forward_batch.forward_mode.is_decode():
            row = (input_ids - self._first_row).unsqueeze(1)
            untold = self.untold[row[:, 0].clamp(0, len(self.untold) - 1)]
            others = torch.where(row >= 0, untold, embeds)
        hidden, positions = torch.cat((embeds, others)), positions.repeat(2)
        for layer in self.layers:
            hidden = layer(positions, hidden, forward_batch)
        return guided(self.norm_f(hidden), GUIDANCE)


class ZonosBackbone(DelayLM):
    def __init__(self, config, quant_config=None, prefix: str = ""):
        begin_id, end_id = config.live_begin_id, config.live_end_id
        # Only the first book tells the end.
        ends = [book * BOOK + end_id for book in range(1, N_BOOKS)]
        super().__init__(
            config,
            ZonosModel(config, quant_config),
            delay=Delay(
                n_books=N_BOOKS, n_codes=N_CODES, begin_id=begin_id, end_id=end_id, marks_end=True
            ),
            text_vocab=config.text_vocab_size,
            n_voice_rows=config.live_voice_rows,
            sampler=Sampler(
                min_p=MIN_P, repetition=Repetition(window=PENALTY_WINDOW, product=True)
            ),
            excluded=[*(book * BOOK + begin_id for book in range(N_BOOKS)), *ends],
        )

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fill every parameter. Raises ValueError: names the weights that are unknown or lack."""
        params = dict(self.named_parameters())
        shape = (self.config.vocab_size, self.config.hidden_size)
        whole = {name: torch.zeros(shape, dtype=params[name].dtype) for name in (_TABLES, _HEADS)}
        loaded, n_books, prefix = Counter[str](), Counter[str](), dict[str, Tensor]()
        for name, tensor in weights:
            kind, _, rest = name.partition(".")
            if kind == "prefix_conditioner":
                prefix[name] = tensor.float()
            elif kind in _BOOKS:
                target, begin = _BOOKS[kind], BOOK * int(rest.removesuffix(".weight"))
                n = min(len(tensor), BOOK)  # some are padded
                whole[target][begin : begin + n] = tensor[:n]
                n_books[target] += 1
            else:
                for part, of_part in _parts(name.replace("backbone.", "model.", 1), tensor, self):
                    target = load_llama_weight(params, part, of_part)
                    if target not in params:
                        raise ValueError(f"unknown weight {name} of Zonos")
                    loaded[target] += 1
        for name, table in whole.items():
            if n_books[name] == N_BOOKS:
                loader = getattr(params[name], "weight_loader", default_weight_loader)
                loader(params[name], table)
                loaded[name] += 1
        if names := lacking(params, loaded):
            raise ValueError(f"checkpoint lacks weights of Zonos: {names[:8]}")
        self._fill_prompts(prefix)
        self.prepare()

    def _fill_prompts(self, prefix: dict[str, Tensor]) -> None:
        """The tables of phonemes and of conditions, behind which are the frame of marks, and the
        speakers of the recordings."""
        try:
            conditions = Conditions(self.config.prefix_conditioner, prefix)
            told, untold = (conditions.rows(guided=told) for told in (True, False))
            self.text_table.copy_(conditions.phonemes())
        except KeyError as error:
            raise ValueError(f"checkpoint lacks weights of Zonos: {error}") from error
        n, device = len(told), self.voices.device
        begin = torch.full((1, N_BOOKS), self.delay.begin_id, device=device)
        for table, rows in ((self.voices, told), (self.model.untold, untold)):
            table[:n] = rows.to(table.device, table.dtype)
            table[n : n + 1] = self._embed_frames(begin)
        if files := self.config.live_recordings:
            found = embeddings_of(Path(self.config.live_checkpoint), [Path(one) for one in files])
            self.voices[n + 1 :] = conditions.speakers(found).to(device, self.voices.dtype)
            names = [one["name"] for one in self.config.prefix_conditioner["conditioners"]]
            names.remove(PHONEMES)
            self.model.untold[n + 1 :] = self.model.untold[names.index(SPEAKER)]


def _parts(name: str, tensor: Tensor, model: ZonosBackbone) -> Iterable[tuple[str, Tensor]]:
    """A weight as those of SGLang's Llama: which are joined otherwise."""
    if name.endswith(".mixer.in_proj.weight"):
        config = model.config
        n_q, n_kv = (n // 2 * config.head_dim for n in _heads(config))
        for part, of_part in zip("qkv", tensor.split([n_q, n_kv, n_kv]), strict=True):
            yield name.replace(".in_proj.", f".{part}_proj."), of_part
    elif name.endswith(".mlp.fc1.weight"):
        up, gate = tensor.chunk(2)
        yield name.replace(".fc1.", ".up_proj."), up
        yield name.replace(".fc1.", ".gate_proj."), gate
    else:
        yield name.replace(".fc2.", ".down_proj.").replace(".out_proj.", ".o_proj."), tensor


def _heads(config) -> tuple[int, int]:
    return config.num_attention_heads, config.num_key_value_heads


EntryClass = ZonosBackbone
