"""Steps of the talker's model outside an engine: what they read, and where they write."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("sglang")
from lab.cpu_graphs.tape import Tape
from sglang_live.bridge.scheduler.codes_observer import CodesObserver
from sglang_live.messages import Frames, Picture
from sglang_live.models.qwen3_omni.engine.talker import Qwen3OmniTalker
from sglang_live.models.speech_lm.engine.steps import logical_positions, three_axes
from sglang_live.models.speech_lm.talker_state import AudioStates, TalkerRows, TalkerStream

PAD, HIDDEN, N_RESIDUAL, MAX_FRAMES, VOCAB, N_ROWS = 9, 4, 3, 16, 20, 6


class FakePredictor(nn.Module):
    """Codes that depend on the first embedding."""

    n_steps = N_RESIDUAL

    def forward(self, past_hidden, first_embed, greedy, draws):
        codes = (first_embed[:, :N_RESIDUAL] * 10).long().remainder(100)
        return codes, past_hidden + first_embed

    def embed_frames(self, codes):
        return codes.float().sum(dim=1, keepdim=True).expand(-1, HIDDEN)


class FakeTalker(SimpleNamespace):
    """A talker without layers; its steps are the model's own."""

    frame_lag = Qwen3OmniTalker.frame_lag
    complete_frames = Qwen3OmniTalker._complete_frames
    embed_extend = Qwen3OmniTalker._embed_extend
    _place_audio = Qwen3OmniTalker._place_audio
    _place_frames = Qwen3OmniTalker._place_frames
    keep_frames_of_extend = Qwen3OmniTalker._keep_frames_of_extend

    def _embed_prompt(self, ids):
        return torch.zeros(len(ids), HIDDEN)


@pytest.fixture
def talker(monkeypatch) -> FakeTalker:
    monkeypatch.setattr("sglang_live.models.speech_lm.engine.talker.all_greedy", lambda _: False)
    torch.manual_seed(0)
    predictor = FakePredictor()
    return FakeTalker(
        config=SimpleNamespace(vocab_size=VOCAB),
        rows=TalkerRows(
            n_rows=N_ROWS,
            max_frames=MAX_FRAMES,
            hidden=HIDDEN,
            n_codes=N_RESIDUAL,
            codec_vocab=VOCAB,
            pad_id=PAD,
            device=torch.device("cpu"),
            dtype=torch.float32,
        ),
        frame_codes=torch.full((N_ROWS, N_RESIDUAL + 1), -1),
        model=SimpleNamespace(embed_tokens=nn.Embedding(VOCAB, HIDDEN)),
        text_table=torch.randn(50, HIDDEN),
        hidden_projection=nn.Linear(6, HIDDEN),
        code_predictor=predictor,
        _predict_codes=predictor,
        streams={},
    )


def stream(rid: str, prompt_len: int, row: int, **fields) -> TalkerStream:
    found = TalkerStream(
        rid=rid,
        prompt_len=prompt_len,
        audio=AudioStates([torch.ones(2, 6)]),
        audio_at=np.array([1, 3]),
        seed=7,
        greedy=False,
        temperature=0.9,
        penalty=1.05,
        text_ids=[1, 2, 3, 4],
        **fields,
    )
    found.row = row
    return found


class FakeOutbox:
    def __init__(self) -> None:
        self.sent: list[Frames] = []

    def send(self, frames: Frames) -> None:
        self.sent.append(frames)


def sent_frames(talker: FakeTalker, rids: list[str], steps: Callable[[], None]) -> list[Frames]:
    """What the real observer sends after a step of a batch."""
    outbox = FakeOutbox()
    observer = CodesObserver(talker, outbox)
    steps()
    if observer.is_active(None):
        state = observer.before_grammar(torch.zeros(len(rids), VOCAB), None)
        batch = SimpleNamespace(reqs=[SimpleNamespace(rid=rid) for rid in rids])
        commits = [SimpleNamespace(output_index=1)] * len(rids)
        host = observer.after_sample(state, None).copy_to_host(lambda codes: codes)
        host.consume(batch, commits)
    return outbox.sent


@torch.no_grad()
@pytest.mark.parametrize("rids", [["a"], ["a", "b"]])
def test_frames_of_replayed_steps_are_sent(talker, rids):
    """A prefill of one request, then steps that run no Python."""
    n = len(rids)
    code0, rows = torch.arange(3, 3 + n), torch.arange(2, 2 + n)
    tape = Tape()
    with tape.recording():
        talker.complete_frames(code0, rows, torch.ones(n, dtype=torch.int64))
    batch = SimpleNamespace(rids=["a"], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[5])
    ids = torch.ones(5, dtype=torch.int64)
    assert sent_frames(talker, ["a"], lambda: talker.keep_frames_of_extend(ids, batch)) == []
    for first in (5, 7):
        code0.copy_(torch.arange(first, first + n))
        [frames] = sent_frames(talker, rids, tape.replay)
        expected = (talker.model.embed_tokens(code0)[:, :N_RESIDUAL] * 10).long().remainder(100)
        assert frames.rids == rids
        assert frames.codes == torch.cat((code0.unsqueeze(1), expected), dim=1).tolist()


@torch.no_grad()
def test_rows_that_pad_a_batch_touch_no_row_of_a_request(talker):
    """Padding has row 0, and the id that was left in its place: also one of a prompt."""
    state = talker.rows
    before = {name: t.clone() for name, t in vars(state).items() if isinstance(t, torch.Tensor)}
    code0, rows = torch.tensor([3, 150_000, 7_000_000]), torch.tensor([4, 0, 0])
    talker.complete_frames(code0, rows, torch.tensor([1, 1, 1]))
    for name, values in before.items():
        others = [row for row in range(1, N_ROWS) if row != 4]
        assert torch.equal(getattr(state, name)[others], values[others]), name
    assert state.seen[4].nonzero().flatten().tolist() == [3]
    assert talker.frame_codes[0, 0] == 3


@torch.no_grad()
@pytest.mark.parametrize("n_frames", [0, 2], ids=["of which code 0 existed", "that was whole"])
def test_a_prefill_reads_nothing_on_the_host(talker, n_frames):
    """A new request with audio, and a retracted one with its newest frame."""
    talker.streams = {
        "new": stream("new", 5, 1),
        "back": stream("back", 4, 3, n_frames=n_frames + 1),
    }
    talker.rows.codes[3, 0] = torch.tensor([11, 12, 13])
    batch = SimpleNamespace(
        rids=["new", "back", "plain"],
        extend_prefix_lens_cpu=[0, 0, 0],
        extend_seq_lens_cpu=[5, 6, 2],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )
    ids = torch.tensor([1] * 5 + [1] * 4 + [8, 9] + [1, 1])
    # A recording refuses whatever reads a tensor's data.
    with Tape().recording():
        embeds = talker.embed_extend(ids, batch)
        talker.keep_frames_of_extend(ids, batch)
    assert (embeds[[1, 3]] != 0).all() and (embeds[[0, 2]] == 0).all()
    assert talker.frame_codes[:, 0].tolist()[:3] == [-1, 9, -1]
    assert torch.equal(talker.frame_codes[1, 1:], talker.rows.codes[3, 1].long())
    assert talker.streams["back"].n_frames == max(2, n_frames + 1)


def test_positions_behind_dropped_frames_are_changed_where_a_prefill_graph_reads_them():
    compacted = stream("compacted", 4, 3, n_frames=30)
    compacted.drop(sink=6, n_frames=20)
    batch = SimpleNamespace(
        rids=["plain", "compacted"],
        extend_prefix_lens_cpu=[0, 3],
        extend_seq_lens_cpu=[2, 5],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )
    positions = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    found = logical_positions(positions, batch, {"compacted": compacted})
    assert found is positions
    assert positions.tolist() == [0, 1, 3, 4, 5, 26, 27]


def test_positions_of_pictures_are_those_of_the_reference():
    """As transformers' get_rope_index: rows and columns count on from the text before."""
    stream = TalkerStream("r", 40, None, np.zeros(0, np.int64), 0, True, 0.9, 1.0)
    stream.pictures = (Picture(3, 2, 4), Picture(14, 3, 1))
    picture = [[3] * 8, [3] * 4 + [4] * 4, [3, 4, 5, 6] * 2]
    text = [7, 8, 9]
    tall = [[10] * 3, [10, 11, 12], [10] * 3]
    after = list(range(13, 20))
    expected = torch.tensor(
        [[0, 1, 2, *p, *text, *t, *after] for p, t in zip(picture, tall, strict=True)]
    )
    n = expected.shape[1]
    for prefix in (0, 5, 12, 15, 18):
        fake = SimpleNamespace(
            rids=["plain", "r"],
            extend_prefix_lens_cpu=[4, prefix],
            extend_seq_lens_cpu=[2, n - prefix],
        )
        positions = torch.cat([torch.arange(4, 6), torch.arange(prefix, n)])
        found = three_axes(positions, fake, {"r": stream})
        assert found[:, :2].tolist() == [[4, 5]] * 3
        assert torch.equal(found[:, 2:], expected[:, prefix:])
    assert stream.shift == 13 - 17
    assert three_axes(positions, fake, {}) is positions


def test_positions_of_a_video_count_its_seconds():
    stream = TalkerStream("r", 40, None, np.zeros(0, np.int64), 0, True, 0.9, 1.0)
    stream.pictures = (Picture(2, 1, 2, layers=3, step=13),)
    time = [0, 1, 2, 2, 15, 15, 28, 28, 29, 30]
    width = [0, 1, 2, 3, 2, 3, 2, 3, 29, 30]
    fake = SimpleNamespace(rids=["r"], extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[10])
    found = three_axes(torch.arange(10), fake, {"r": stream})
    assert found.tolist() == [time, [0, 1, *[2] * 6, 29, 30], width]
    assert stream.shift == 27 - 6
