"""The audio encoder in two halves: convolutions with stored outputs, layers trained on these."""

import pytest
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from training.demo.convolved import (
    convolve,
    convolve_clips,
    encode_convolved,
    join_clips,
    layers_of,
)
from training.demo.distortion import Distortion
from training.demo.hearing import Heard, encode

# Frames: of one piece, of whole pieces, and more than one attention window (8 s).
LENGTHS = (37, 100, 200, 285, 930)


@pytest.fixture(scope="module")
def tower() -> Qwen3OmniMoeAudioEncoder:
    torch.manual_seed(1)
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 64, "output_dim": 48, "downsample_hidden_size": 8}
    config = Qwen3OmniMoeAudioEncoderConfig(**sizes, n_window=50, n_window_infer=800)
    return Qwen3OmniMoeAudioEncoder(config).eval()


def clips() -> list[Heard]:
    choose = torch.Generator().manual_seed(2)
    return [Heard(str(n), torch.randn(128, n, generator=choose).half()) for n in LENGTHS]


@torch.no_grad()
def test_both_halves_together_are_the_encoder(tower):
    mels = [clip.mel.float() for clip in clips()]
    whole, halves = encode(tower, mels), encode_convolved(tower, convolve(tower, mels))
    for one, other in zip(whole, halves, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_the_layers_are_all_but_the_convolutions(tower):
    learned = {id(parameter) for parameter in layers_of(tower)}
    rest = {name for name, p in tower.named_parameters() if id(p) not in learned}
    assert {name.split(".")[0] for name in rest} == {"conv2d1", "conv2d2", "conv2d3", "conv_out"}


def test_each_recording_comes_as_it_is_and_then_distorted(tower):
    heard = clips()
    made = list(convolve_clips(tower, heard, 3, Distortion(colour=0.3), seed=5))
    assert [one.text for one in made] == [clip.text for clip in heard for _ in range(3)]
    assert not any(one.rows.requires_grad for one in made)
    for clip, plain, other in zip(heard, made[::3], made[1::3], strict=True):
        [rows] = convolve(tower, [clip.mel.float()])
        torch.testing.assert_close(plain.rows, rows.half(), rtol=0, atol=1e-2)
        same = plain.rows.shape == other.rows.shape and torch.equal(plain.rows, other.rows)
        assert not same


def test_the_same_seed_distorts_alike(tower):
    one, again = (convolve_clips(tower, clips(), 2, Distortion(), seed=5) for _ in range(2))
    assert torch.equal(one.rows, again.rows)


def test_joined_clips_hold_several_sentences():
    made = join_clips(clips(), 20, most=4, seed=6)
    for one in made:
        parts = one.text.split()
        assert 2 <= len(parts) <= 4
        assert one.mel.shape == (128, sum(map(int, parts)))
    assert len({one.text for one in made}) > 10
