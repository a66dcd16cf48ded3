"""Audio in the thinker's prefill: places and lengths are known on the host."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("sglang")
from sglang.srt.models.qwen3_omni_moe import _get_feat_extract_output_lengths

from lab.cpu_graphs.tape import Tape
from sglang_live.messages import Picture
from sglang_live.models.qwen3_omni.engine.thinker import Lengths, encode, media_spans

CHUNK, WINDOW_CHUNKS = 100, 8


@given(st.lists(st.integers(1, 2500), min_size=1, max_size=5))
def test_lengths_equal_those_that_upstream_computes_on_the_device(clips):
    lengths = Lengths.of(clips, CHUNK, WINDOW_CHUNKS)
    feature_lens = torch.tensor(clips)
    chunk_num = torch.ceil(feature_lens / CHUNK).long()
    chunks = torch.full((int(chunk_num.sum()),), CHUNK)
    chunks[chunk_num.cumsum(0) - 1] = feature_lens % CHUNK
    chunks[chunks == 0] = CHUNK
    assert lengths.chunks == chunks.tolist()
    assert lengths.after_cnn == _get_feat_extract_output_lengths(chunks).tolist()
    per_clip = _get_feat_extract_output_lengths(feature_lens).tolist()
    assert sum(lengths.after_cnn) == sum(lengths.windows) == sum(per_clip)
    window = max(lengths.after_cnn) * WINDOW_CHUNKS
    assert all(0 < n <= window for n in lengths.windows)
    assert len(lengths.windows) == sum(-(-n // window) for n in per_clip)


class FakeLinear(nn.Linear):
    """With SGLang's pair of results."""

    def forward(self, x):
        return super().forward(x), None


class FakeAttention(nn.Module):
    def forward(self, x, cu_seqlens, forward_metadata):
        assert forward_metadata.max_seqlen > 0
        return x * forward_metadata.seq_lens.sum() / cu_seqlens[-1]


def fake_tower(width: int = 4, mels: int = 8) -> nn.Module:
    """Layers of an encoder, without SGLang's parallel groups."""
    layer = SimpleNamespace(
        self_attn=FakeAttention(),
        self_attn_layer_norm=nn.LayerNorm(width),
        final_layer_norm=nn.LayerNorm(width),
        activation_fn=nn.GELU(),
        fc1=FakeLinear(width, 8),
        fc2=FakeLinear(8, width),
    )
    return SimpleNamespace(
        n_window=CHUNK // 2,
        n_window_infer=CHUNK * WINDOW_CHUNKS,
        conv_chunksize=2,
        conv2d1=nn.Conv2d(1, 2, 3, 2, padding=1),
        conv2d2=nn.Conv2d(2, 2, 3, 2, padding=1),
        conv2d3=nn.Conv2d(2, 2, 3, 2, padding=1),
        conv_out=FakeLinear(2, width),
        positional_embedding=SimpleNamespace(positional_embedding=torch.randn(50, width)),
        layers=[layer, layer],
        ln_post=nn.LayerNorm(width),
        proj1=FakeLinear(width, width),
        act=nn.GELU(),
        proj2=FakeLinear(width, 6),
    )


@pytest.mark.parametrize("clips", [[1], [100, 250], [1300, 20, 99]])
@torch.no_grad()
def test_the_encoder_reads_nothing_on_the_host(clips):
    frames = torch.randn(8, sum(clips))
    # A recording refuses whatever reads a tensor's data.
    with Tape().recording():
        out = encode(fake_tower(), frames, clips)
    n_positions = sum(_get_feat_extract_output_lengths(n) for n in clips)
    assert out.shape == (n_positions, 6)


@dataclass
class FakeItem:
    offsets: list[tuple[int, int]] | None
    grid: tuple[str, list[int]] | None = None

    @property
    def model_specific_data(self) -> dict[str, torch.Tensor]:
        name, sides = self.grid
        return {f"{name}_grid_thw": torch.tensor([sides])}

    def is_audio(self) -> bool:
        return self.grid is None

    def is_image(self) -> bool:
        return self.grid is not None and self.grid[0] == "image"


@dataclass
class FakeBatch:
    rids: list[str]
    extend_prefix_lens_cpu: list[int]
    extend_seq_lens_cpu: list[int]
    mm_inputs: list = field(default_factory=list)


@st.composite
def requests(draw):
    """(prefix, n, places of audio in the session) of each request of a batch."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        prefix, n = draw(st.integers(0, 12)), draw(st.integers(1, 12))
        places = draw(st.sets(st.integers(0, prefix + n + 5), max_size=12))
        found.append((prefix, n, sorted(places)))
    return found


def items_of(places: list[int]) -> list[FakeItem]:
    """One item for each run of places, in descending order."""
    runs: list[list[int]] = []
    for place in places:
        if runs and runs[-1][1] == place - 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    audio = [FakeItem([(first, last)]) for first, last in reversed(runs)]
    return [*audio, FakeItem(None)]


@given(requests())
def test_the_rows_of_audio_are_those_of_its_tokens(batch):
    n_tokens = sum(n for _, n, _ in batch)
    states = torch.arange(n_tokens).unsqueeze(1)
    fake = FakeBatch(
        [f"r{i}" for i in range(len(batch))],
        [prefix for prefix, _, _ in batch],
        [n for _, n, _ in batch],
        [SimpleNamespace(mm_items=items_of(p)) if p else None for _, _, p in batch],
    )
    expected, start = [], 0
    for i, (prefix, n, places) in enumerate(batch):
        at = [place for place in places if prefix <= place < prefix + n]
        if at:
            expected.append((f"r{i}", at, [place - prefix + start for place in at]))
        start += n
    found = media_spans(fake, merge=2, step=13)
    # A recording refuses whatever reads a tensor's data.
    with Tape().recording():
        rows = [audio.rows(states) for audio in found]
    assert [
        (audio.rid, audio.positions, row.flatten().tolist())
        for audio, row in zip(found, rows, strict=True)
    ] == expected


def test_what_is_seen_has_its_layers_rows_and_columns():
    items = [FakeItem([(1, 6)], ("image", [1, 4, 6])), FakeItem([(8, 25)], ("video", [3, 4, 6]))]
    fake = FakeBatch(["r"], [4], [30], [SimpleNamespace(mm_items=items)])
    [found] = media_spans(fake, merge=2, step=13)
    assert found.pictures == [Picture(1, 2, 3, 1, 13), Picture(8, 2, 3, 3, 13)]
    assert found.positions == [4, 5, 6, *range(8, 26)]
    assert found.pictures[1].n_positions == 27
