"""A flow and a HiFT of CosyVoice 2's shape with random weights, as flow.pt and hift.pt have them.

Every layer passes a signal of unit size: N(0, 1 / fan-in), norms near 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_live.models.codecs.flow import AHEAD

N_MELS, _N_SPEAKER, _HEAD_DIM, _N_HARMONICS = 80, 192, 64, 9
# HiFT: stride of each level, kernel of the units beside the source, and of the other units.
_STRIDES, _SOURCE_KERNELS, _KERNELS = (8, 5, 3), (7, 7, 11), (3, 7, 11)
_SOURCE_STRIDES = (15, 3, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowShape:
    """Defaults are those of cosyvoice2.yaml.

    encoder_width, encoder_inner, encoder_heads, encoder_layers, up_layers: of the conformer.
    width, heads, layers, mid: of the estimator: its layers in each of mid + 2 stages.
    hift_width: of HiFT's first layer.
    """

    n_codes: int = 6561
    encoder_width: int = 512
    encoder_inner: int = 2048
    encoder_heads: int = 8
    encoder_layers: int = 6
    up_layers: int = 4
    width: int = 256
    heads: int = 8
    layers: int = 4
    mid: int = 12
    hift_width: int = 512


class _Made(dict[str, Tensor]):
    def __init__(self, seed: int):
        super().__init__()
        self._rng = torch.Generator().manual_seed(seed)

    def weight(self, name: str, *shape: int, bias: bool = True) -> None:
        fan_in = torch.Size(shape[1:]).numel()
        self[f"{name}.weight"] = torch.randn(shape, generator=self._rng) * fan_in**-0.5
        if bias:
            self.plain(f"{name}.bias", shape[0])

    def plain(self, name: str, *shape: int, around: float = 0.0) -> None:
        self[name] = around + 0.1 * torch.randn(shape, generator=self._rng)

    def norm(self, name: str, width: int) -> None:
        self.plain(f"{name}.weight", width, around=1.0)
        self.plain(f"{name}.bias", width)


def random_flow(shape: FlowShape, seed: int) -> dict[str, Tensor]:
    """On the CPU, in float32."""
    made, width = _Made(seed), shape.encoder_width
    made["input_embedding.weight"] = torch.randn(shape.n_codes, width, generator=made._rng)
    made.weight("spk_embed_affine_layer", N_MELS, _N_SPEAKER)
    made.weight("encoder_proj", N_MELS, width)
    for name in ("embed", "up_embed"):
        made.weight(f"encoder.{name}.out.0", width, width)
        made.norm(f"encoder.{name}.out.1", width)
    for name, kernel in (
        ("pre_lookahead_layer.conv1", AHEAD + 1),
        ("pre_lookahead_layer.conv2", 3),
        ("up_layer.conv", 5),
    ):
        made.weight(f"encoder.{name}", width, width, kernel)
    for name, n in (("encoders", shape.encoder_layers), ("up_encoders", shape.up_layers)):
        for i in range(n):
            _conformer_layer(made, f"encoder.{name}.{i}", shape)
    made.norm("encoder.after_norm", width)
    _estimator(made, "decoder.estimator", shape)
    return dict(made)


def _conformer_layer(made: _Made, name: str, shape: FlowShape) -> None:
    width, inner = shape.encoder_width, shape.encoder_inner
    for part in ("q", "k", "v", "out"):
        made.weight(f"{name}.self_attn.linear_{part}", width, width)
    made.weight(f"{name}.self_attn.linear_pos", width, width, bias=False)
    for part in "uv":
        heads = shape.encoder_heads
        made.plain(f"{name}.self_attn.pos_bias_{part}", heads, width // heads)
    made.weight(f"{name}.feed_forward.w_1", inner, width)
    made.weight(f"{name}.feed_forward.w_2", width, inner)
    made.norm(f"{name}.norm_mha", width)
    made.norm(f"{name}.norm_ff", width)


def _estimator(made: _Made, name: str, shape: FlowShape) -> None:
    width, n_in = shape.width, 4 * N_MELS
    made.weight(f"{name}.time_mlp.linear_1", 4 * width, n_in)
    made.weight(f"{name}.time_mlp.linear_2", 4 * width, 4 * width)
    stages = {"down_blocks.0": n_in, "up_blocks.0": 2 * width}
    stages |= {f"mid_blocks.{i}": width for i in range(shape.mid)}
    for stage, n in stages.items():
        _block(made, f"{name}.{stage}.0.block1", width, n)
        _block(made, f"{name}.{stage}.0.block2", width, width)
        made.weight(f"{name}.{stage}.0.mlp.1", width, 4 * width)
        made.weight(f"{name}.{stage}.0.res_conv", width, n, 1)
        for i in range(shape.layers):
            _transformer_layer(made, f"{name}.{stage}.1.{i}", shape)
    for stage in ("down_blocks.0", "up_blocks.0"):
        made.weight(f"{name}.{stage}.2", width, width, 3)
    _block(made, f"{name}.final_block", width, width)
    made.weight(f"{name}.final_proj", N_MELS, width, 1)


def _block(made: _Made, name: str, width: int, n_in: int) -> None:
    made.weight(f"{name}.block.0", width, n_in, 3)
    made.norm(f"{name}.block.2", width)


def _transformer_layer(made: _Made, name: str, shape: FlowShape) -> None:
    width, inner = shape.width, shape.heads * _HEAD_DIM
    for part in "qkv":
        made.weight(f"{name}.attn1.to_{part}", inner, width, bias=False)
    made.weight(f"{name}.attn1.to_out.0", width, inner)
    made.weight(f"{name}.ff.net.0.proj", 4 * width, width)
    made.weight(f"{name}.ff.net.2", width, 4 * width)
    made.norm(f"{name}.norm1", width)
    made.norm(f"{name}.norm3", width)


def random_hift(shape: FlowShape, seed: int) -> dict[str, Tensor]:
    """On the CPU, in float32."""
    made, width = _Made(seed), shape.hift_width
    for i in range(0, 10, 2):
        made.weight(f"f0_predictor.condnet.{i}", width, width if i else N_MELS, 3)
    made.weight("f0_predictor.classifier", 1, width)
    made["f0_predictor.classifier.bias"] += 150.0  # Hz, of a voice
    made.weight("m_source.l_linear", 1, _N_HARMONICS)
    made.weight("conv_pre", width, N_MELS, 7)
    for i, stride in enumerate(_STRIDES):
        wide, width = width, width // 2
        made.weight(f"ups.{i}", wide, width, 2 * stride + stride % 2, bias=False)
        made.plain(f"ups.{i}.bias", width)
        down = _SOURCE_STRIDES[i]
        made.weight(f"source_downs.{i}", width, 18, 2 * down if down > 1 else 1)
        _unit(made, f"source_resblocks.{i}", width, _SOURCE_KERNELS[i])
        for j, kernel in enumerate(_KERNELS):
            _unit(made, f"resblocks.{len(_KERNELS) * i + j}", width, kernel)
    made.weight("conv_post", 18, width, 7)
    return dict(made)


def _unit(made: _Made, name: str, width: int, kernel: int) -> None:
    for i in range(3):
        for part in (1, 2):
            made.weight(f"{name}.convs{part}.{i}", width, width, kernel)
            made.plain(f"{name}.activations{part}.{i}.alpha", width, around=1.0)
