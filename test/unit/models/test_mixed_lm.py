"""Text between the frames of a request: which step takes text, which draws, and what it draws.

Outside of an engine, with a model without layers; test/engine/test_delay.py has a whole one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from sglang_live.models.cosyvoice.engine.talker import CosyVoiceLM
from sglang_live.models.cosyvoice.family import N_CODES, RATIO, VERSIONS
from sglang_live.models.speech_lm.mixing import MixedVoice
from sglang_live.models.speech_lm.sampler import Redraw, Sampler
from sglang_live.models.speech_lm.talker_state import TalkerRows
from sglang_live.stages.talker.mixed_text import MixedText
from test.cosyvoice import checkpoint as tiny
from test.noise import noise_of
from test.unit.models.test_frame_lm import decode, prefill, stream

VERSION = 2
N_IDS, FILL = N_CODES + 3, VERSIONS["cosyvoice2.yaml"].fill_id
FIRST_ROW = N_IDS + tiny.TEXT_VOCAB
TASK, AGAIN = FIRST_ROW + 1, FIRST_ROW + 2


class Layerless(nn.Module):
    """In the place of a language model's layers: states are inputs."""

    def __init__(self, embed_tokens: nn.Module):
        super().__init__()
        self.embed_tokens = embed_tokens

    def forward(self, inputs_embeds, past_key_values):
        return SimpleNamespace(
            last_hidden_state=inputs_embeds, past_key_values=past_key_values or 1
        )


class Steps(CosyVoiceLM):
    def __init__(self, weights: nn.Module):
        nn.Module.__init__(self)
        self.config = SimpleNamespace(vocab_size=N_IDS, eos_token_id=N_CODES)
        self.sampler = Sampler(
            top_k=25, top_p=0.8, of_all=True, redraw=Redraw(window=10, least=1, excludes=True)
        )
        self.n_codes, self.frame_width, self.streams = 2, 1, {}
        self.fill_id, self._ratio, self._task_id, self._again_id = FILL, RATIO, TASK, AGAIN
        self._n_codes, self._late = N_CODES, [N_CODES]
        self.marks = self._bias(N_CODES)
        self.text_table = weights.llm.model.model.embed_tokens.weight.detach()
        self.voices = weights.llm_embedding.weight.detach()
        self.allowed = weights.llm_decoder.bias.detach()
        self._head = weights.llm_decoder.weight.detach()
        self.model = SimpleModel(weights.speech_embedding)
        self.rows = TalkerRows(
            n_rows=4,
            max_frames=2_000,
            hidden=0,
            n_codes=2,
            codec_vocab=0,
            pad_id=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        self.frame_codes = torch.full((4, 1), -1)
        self.codec_head = None
        self.logits_processor = self._logits

    @torch.no_grad()
    def _logits(self, ids, hidden, head, batch):
        if batch.forward_mode.is_extend():
            hidden = hidden[batch.extend_seq_lens.cumsum(0) - 1]
        return SimpleNamespace(next_token_logits=hidden @ self._head.T)


class SimpleModel(nn.Module):
    def __init__(self, embed_tokens: nn.Module):
        super().__init__()
        self.embed_tokens = embed_tokens

    def forward(self, ids, positions, batch, embeds):
        return embeds


@pytest.fixture(scope="module")
def reference():
    """Without layers, which have what no weight of the others has."""
    made = tiny.model.__wrapped__(end_every=64, version=VERSION, fill_every=12)
    made.llm.model.model = Layerless(made.llm.model.model.embed_tokens)
    return made


def voice_of(n_words: int, n_codes: int) -> MixedVoice:
    rng = np.random.default_rng(n_words)
    return MixedVoice(
        ratio=RATIO,
        head=[FIRST_ROW],
        words=(N_IDS + rng.integers(1, 200, n_words)).tolist(),
        codes=rng.integers(0, N_CODES, n_codes).tolist(),
        task_id=TASK,
        again_id=AGAIN,
    )


def spoken(model: Steps, voice: MixedVoice, words: list[int], seed: int, pause: int) -> list[int]:
    """Codes of a request alone. pause: steps after which it is retracted once; 0: never."""
    text = MixedText(voice)
    text.add([N_IDS + word for word in words])
    text.end()
    prompt = text.prompt()
    one = stream("r", 1, len(prompt), seed=seed, greedy=False)
    one.block = voice.block
    model.rows.bind(one, 1)
    text.pass_to(lambda ids, done: one.text_ids.extend(ids))
    model.rows.refresh(one)
    tokens, frames = prefill(model, (one, 1, prompt, 0)), [int(model.frame_codes[0, 0])]
    ids = list(tokens)
    while frames[-1] != -1:
        one.n_frames = len(frames)
        if len(frames) == pause:
            model.rows.unbind(one)
            model.rows.bind(one, 2)
            tokens = prefill(model, (one, 2, [*prompt, *ids], 0))
        else:
            tokens = decode(model, [one.row], tokens, [len(prompt) + len(frames)])
        frames.append(int(model.frame_codes[0, 0]))
        ids += tokens
    assert [token == FILL for token in ids] == [code < -1 for code in frames]
    return [code for code in frames if code >= 0]


@pytest.mark.parametrize(("n_words", "n_codes"), [(20, 40), (14, 45), (9, 22), (0, 0), (4, 0)])
def test_codes_equal_those_of_the_reference(reference, n_words, n_codes):
    model, voice = Steps(reference), voice_of(n_words, n_codes)
    reference.n_redrawn = reference.n_fills = reference.n_early = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        words = rng.integers(1, 200, voice.n_least - n_words + 21 + seed).tolist()
        wanted = reference.inference_bistream(
            (chunk for word in words for chunk in ([word], *[[]] * 9)),
            [word - N_IDS for word in voice.words],
            list(voice.codes),
            noise=noise_of(seed),
        )
        for pause in (0, 1, 20, 47):
            assert spoken(model, voice, words, seed, pause) == wanted
    assert reference.n_redrawn > 10 and reference.n_fills > reference.n_early > 0
