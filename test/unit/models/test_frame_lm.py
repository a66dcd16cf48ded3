"""Steps of a model that draws whole frames, outside an engine: what they read and write."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from lab.cpu_graphs.tape import Tape
from sglang_live.bridge.scheduler.codes_observer import CodesObserver
from sglang_live.models.speech_lm.engine.frame_lm import FrameLM
from sglang_live.models.speech_lm.sampler import Redraw, Repetition, Sampler
from sglang_live.models.speech_lm.talker_state import TalkerRows, TalkerStream

VOCAB, TEXT_VOCAB, HIDDEN, N_CODES, MAX_FRAMES, N_ROWS = 20, 30, 8, 3, 16, 6
END = VOCAB - 1


class TinyLM(FrameLM):
    """Without layers: its states are its inputs. The other codes follow from the first.

    `engine` stands for SGLang's layers, which need an engine.
    """

    def __init__(self, sampler: Sampler, n_voice_rows: int = 4):
        nn.Module.__init__(self)
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCAB, eos_token_id=END)
        self.sampler, self.n_codes, self.streams = sampler, N_CODES, {}
        self.table = torch.randn(N_CODES, VOCAB, HIDDEN)
        self.head = 2 * torch.randn(VOCAB, HIDDEN)
        self.text_table = torch.randn(TEXT_VOCAB, HIDDEN)
        self.voices = torch.randn(n_voice_rows, HIDDEN)
        self.allowed = torch.zeros(VOCAB).index_fill(0, torch.tensor([END]), -torch.inf)
        self._late = [7]
        self.model = lambda ids, positions, batch, embeds: embeds
        self.rows = TalkerRows(
            n_rows=N_ROWS,
            max_frames=MAX_FRAMES,
            hidden=0,
            n_codes=N_CODES,
            codec_vocab=VOCAB,
            pad_id=0,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        self.frame_codes = torch.full((N_ROWS, N_CODES), -1)
        self.codec_head = None
        self.logits_processor = self._logits

    def _logits(self, ids, hidden, head, batch):
        if batch.forward_mode.is_extend():
            hidden = hidden[batch.extend_seq_lens.cumsum(0) - 1]
        return SimpleNamespace(next_token_logits=hidden @ self.head.T)

    def _embed_frames(self, codes):
        return sum(self.table[book, codes[:, book]] for book in range(N_CODES))

    def _others(self, first, hidden, greedy, draws):
        return torch.stack([(3 * first + 1) % 17, (5 * first + 2) % 17], dim=1)

    def _ends(self, codes):
        return codes[:, 0] == 7


def endless(sampler: Sampler) -> TinyLM:
    model = TinyLM(sampler)
    model._ends = lambda codes: codes[:, 0] < 0
    return model


def stream(rid: str, row: int, prompt_len: int = 3, **fields) -> TalkerStream:
    settings = {"seed": 5, "greedy": True, "temperature": 1.0, "penalty": 1.5}
    return TalkerStream(
        rid=rid,
        prompt_len=prompt_len,
        audio=None,
        audio_at=np.empty(0, np.int64),
        **settings | fields,
    )


def mode(kind: str):
    return SimpleNamespace(is_decode=lambda: kind == "decode", is_extend=lambda: kind == "extend")


def prefill(model: TinyLM, *requests: tuple[TalkerStream, int, list[int], int]) -> list[int]:
    """A step of (stream, row, ids, those before them); the tokens that SGLang chooses."""
    rows, ids, positions = [], [], []
    for one, row, chunk, prefix in requests:
        model.streams[one.rid] = one
        if one.row != row:
            model.rows.bind(one, row)
        rows.append(row)
        ids += chunk
        positions += range(prefix, prefix + len(chunk))
    lengths = [len(chunk) for _, _, chunk, _ in requests]
    batch = SimpleNamespace(
        forward_mode=mode("extend"),
        req_pool_indices=torch.tensor(rows),
        rids=[one.rid for one, *_ in requests],
        extend_prefix_lens_cpu=[prefix for *_, prefix in requests],
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths),
        seq_lens=torch.tensor([p + len(chunk) for _, _, chunk, p in requests]),
    )
    output = model(torch.tensor(ids), torch.tensor(positions), batch)
    return output.next_token_logits.argmax(dim=-1).tolist()


def decode(model: TinyLM, rows: list[int], tokens: list[int], seq_lens: list[int]) -> list[int]:
    batch = SimpleNamespace(
        forward_mode=mode("decode"),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
    )
    output = model(torch.tensor(tokens), torch.tensor(seq_lens) - 1, batch)
    return output.next_token_logits.argmax(dim=-1).tolist()


PROMPT = [VOCAB + 4, VOCAB + TEXT_VOCAB + 2, VOCAB + 9]


def run(model: TinyLM, one: TalkerStream, row: int, n: int) -> list[list[int]]:
    """Frames of a request alone."""
    token = prefill(model, (one, row, PROMPT, 0))
    frames = [model.frame_codes[0].tolist()]
    for at in range(1, n):
        token = decode(model, [row], token, [len(PROMPT) + at])
        frames.append(model.frame_codes[0].tolist())
    return frames


def test_a_prompt_is_texts_and_rows_of_the_table_of_voices():
    model = TinyLM(Sampler())
    embeds = model._embed_prompt(torch.tensor(PROMPT))
    expected = [model.text_table[4], model.voices[2], model.text_table[9]]
    assert torch.equal(embeds, torch.stack(expected))
    nameless = TinyLM(Sampler(), n_voice_rows=0)
    assert torch.equal(nameless._embed_prompt(torch.tensor([VOCAB + 4])), nameless.text_table[4:5])


def test_the_step_that_draws_the_first_code_completes_the_frame_and_a_later_one_reads_it():
    model = endless(Sampler())
    frames = run(model, stream("a", 2), 2, 6)
    for frame, following in pairwise(frames):
        state = model._embed_frames(torch.tensor([frame]))[0]
        first = int((state @ model.head.T + model.allowed).argmax())
        assert following == [first, (3 * first + 1) % 17, (5 * first + 2) % 17]
    assert len({frame[0] for frame in frames}) > 2, "the case must not be trivial"
    assert model.rows.codes[2, 0].tolist() == frames[0]


def test_the_end_is_a_token_without_a_frame():
    model, one = TinyLM(Sampler()), stream("a", 1)
    model.head.zero_()
    model.head[7] = model.text_table[9]
    assert prefill(model, (one, 1, PROMPT, 0)) == [END]
    assert model.frame_codes[0].tolist() == [-1] * N_CODES


@pytest.mark.parametrize("greedy", [True, False])
def test_a_request_does_not_end_before_its_least_number_of_frames(greedy):
    model = TinyLM(Sampler())
    model.head[7] = 0.0
    model.allowed[7] = 100.0
    one = stream("a", 1, greedy=greedy, least_frames=3)
    frames = run(model, one, 1, 5)
    assert [frame[0] >= 0 for frame in frames] == [True, True, True, False, False]
    assert 7 not in {frame[0] for frame in frames}
    # Also for the next request in its row.
    assert run(model, stream("b", 1, greedy=greedy), 1, 1) == [[-1] * N_CODES]


def test_only_the_last_chunk_of_a_prefill_stores_a_frame():
    model = TinyLM(Sampler())
    back, other = stream("back", 3), stream("other", 4)
    model.streams["back"] = back
    model.rows.bind(back, 3)
    model.rows.codes[3, :4] = torch.arange(12).view(4, 3).to(torch.int16)
    back.n_frames, back.mid_prefill = 4, True
    known = model.rows.codes[3].clone()
    # Retracted with four frames: of its seven tokens the chunk has the first five.
    prefill(model, (back, 3, [*PROMPT, 0, 3], 0), (other, 4, PROMPT, 0))
    assert torch.equal(model.rows.codes[3], known)
    assert model.rows.codes[4, 0].tolist() == model.frame_codes[1].tolist()
    back.mid_prefill = False
    prefill(model, (back, 3, [6, 9], 5))
    assert torch.equal(model.rows.codes[3, :4], known[:4])
    assert model.rows.codes[3, 4].tolist() == model.frame_codes[0].tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "rules",
    [
        {"top_k": 5, "repetition": Repetition()},
        {"top_p": 0.9, "repetition": Repetition(window=2, product=True)},
        {"repetition": Repetition(window=4), "redraw": Redraw(window=3, least=1, excludes=True)},
    ],
    ids=["all", "product", "window and redraw"],
)
def test_a_retracted_request_goes_on_with_the_frames_that_it_would_have_had(rules, seed):
    fields = {"seed": seed, "greedy": False, "temperature": 1.3}
    model = endless(Sampler(**rules))
    wanted = run(model, stream("whole", 1, **fields), 1, 10)
    one = stream("back", 2, **fields)
    first = run(model, one, 2, 4)
    assert first == wanted[:4]
    one.n_frames = 4
    model.rows.unbind(one)
    tokens = [frame[0] for frame in first]
    # In another row, which another request has left its codes in.
    model.rows.codes[5].fill_(11)
    model.rows.seen[5].fill_(True)
    token = prefill(model, (one, 5, [*PROMPT, *tokens], 0))
    frames = [model.frame_codes[0].tolist()]
    for at in range(5, 10):
        beside = decode(model, [1, 5], [0, token[0]], [len(PROMPT) + 9, len(PROMPT) + at])
        token = beside[1:]
        frames.append(model.frame_codes[1].tolist())
    assert frames == wanted[4:]


def test_rules_of_repetition_change_what_is_drawn():
    """Otherwise the claim above would be empty."""
    fields = {"seed": 1, "greedy": False, "temperature": 1.3, "penalty": 3.0}
    found = []
    for rules in ({}, {"repetition": Repetition()}, {"repetition": Repetition(window=2)}):
        model = endless(Sampler(**rules))
        found.append(run(model, stream("one", 1, **fields), 1, 12))
    assert found[0] != found[1] != found[2] != found[0]


def test_a_step_is_captured_without_a_read_of_the_device():
    model = TinyLM(Sampler(top_k=4, repetition=Repetition()))
    for row in (1, 2):
        prefill(model, (stream(str(row), row, greedy=False), row, PROMPT, 0))
    tape, ids = Tape(), torch.tensor([3, 5])
    batch = SimpleNamespace(
        forward_mode=mode("decode"),
        req_pool_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([4, 4]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang_live.models.speech_lm.engine.frame_lm.all_greedy", lambda _: False)
        with tape.recording():
            model(ids, batch.seq_lens - 1, batch)
    tape.replay()
    recorded = model.frame_codes[:2].clone()
    decode(model, [1, 2], [3, 5], [4, 4])
    assert torch.equal(recorded, model.frame_codes[:2])


def test_the_observer_gives_a_frame_the_index_of_its_own_token():
    model, one = TinyLM(Sampler()), stream("a", 1)
    prefill(model, (one, 1, PROMPT, 0))
    sent = []
    observer = CodesObserver(model, SimpleNamespace(send=sent.append))
    state = observer.before_grammar(torch.zeros(1, VOCAB), None)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a")])
    host = observer.after_sample(state, None).copy_to_host(lambda codes: codes)
    host.consume(batch, [SimpleNamespace(output_index=0)])
    host.consume(batch, [None])  # a chunk that is not the last
    [frames] = sent
    assert (frames.rids, frames.index, len(frames.codes[0])) == (["a"], [0], N_CODES)
