"""The kernels that benchmark.speaking_models counts are those of the product's decoders, which do
not depend on the widths of their layers."""

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.speaking_models import SHAPES, Flow
from sglang_live.models.codecs.flow.mels import FlowInput, TokenFlow
from sglang_live.models.codecs.hift import HiftState, hift_of
from test.flow import checkpoint as tiny
from test.flow import reference, reference3

_VIEWS = """
    view _unsafe_view as_strided transpose permute t expand slice select unsqueeze squeeze split
    split_with_sizes unbind detach alias lift_fresh empty empty_like empty_strided new_empty
    view_as_real view_as_complex unfold unflatten chunk expand_as _local_scalar_dense
"""


class Kernels(TorchDispatchMode):
    """n: operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += func._schema.name.removeprefix("aten::") not in _VIEWS.split()
        return func(*args, **(kwargs or {}))


def flow_of(version: int) -> TokenFlow:
    """Of the published depth, with narrow layers."""
    width, sizes = tiny.WIDTH, {"n_heads": 2, "head_dim": 64}
    if version == 2:
        encoder = reference.Encoder(width, n_heads=2, wide=48, n_layers=6, n_up_layers=4)
        estimator = reference.Estimator(width, **sizes, n_layers=4, n_mid=12)
        module = reference.Flow(tiny.N_CODES, width, encoder, estimator)
    else:
        dit = reference3.DiT(width, **sizes, n_layers=22)
        module = reference3.Flow(tiny.N_CODES, n_look=48, estimator=dit)
    return TokenFlow(dict(module.state_dict()), torch.device("cpu"), torch.float32)


def kernels_of(call: Callable[[], object]) -> int:
    with Kernels() as kernels, torch.inference_mode():
        call()
    return kernels.n


@pytest.mark.parametrize("version", [2, 3])
def test_the_kernels_of_a_flow_are_counted(version):
    shape = SHAPES[f"cosyvoice{version}"].eager
    assert isinstance(shape, Flow)
    flow = flow_of(version)
    codes, mel, speaker = tiny.voices()["ada"]
    given = FlowInput(flow.voice(codes, mel, speaker), tiny.random_codes(30, seed=1), 0, 0)
    batch = flow.batch(1, 40, 40, flow._empty)
    flow.fill(batch, [given])
    begin, step = (kernels_of(lambda call=call: call(batch)) for call in (flow.begin, flow.step))
    assert begin == pytest.approx(shape.n_begin_kernels, rel=0.03)
    assert step == pytest.approx(shape.n_kernels, rel=0.02)
    _, module = tiny.modules(version)
    hift = hift_of(dict(module.state_dict()), torch.device("cpu"), torch.float32)
    mels = [torch.randn(80, 60)]
    n_hift = kernels_of(lambda: hift.vocode([HiftState()], mels, [True]))
    assert n_hift == pytest.approx(shape.n_hift_kernels, rel=0.02)
