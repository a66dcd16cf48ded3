import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sglang_live.bridge.platform.compiling import end_compiling


def compiled(*, enable_torch_compile: bool) -> list[int]:
    """Graphs compiled of a function before an engine serves, then of it for a larger batch, and of
    another one."""
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    def doubled(x):
        return x * 2

    def halved(x):
        return x / 2

    early, late = (torch.compile(f, dynamic=True, backend=backend) for f in (doubled, halved))
    early(torch.ones(1))
    counts = [len(graphs)]
    arguments = SimpleNamespace(enable_torch_compile=enable_torch_compile)
    runner = SimpleNamespace(server_args=arguments)
    assert end_compiling(5, runner, capture_decode_cuda_graph=True) == 5
    for function, expected in ((early, 2.0), (late, 0.5)):
        for n in (1, 4):
            assert function(torch.ones(n)).tolist() == [expected] * n
        counts.append(len(graphs))
    return counts


@pytest.mark.parametrize(("asked", "n_graphs"), [(False, [1, 1, 1]), (True, [1, 2, 4])])
def test_an_engine_that_serves_compiles_only_what_its_operator_asks_for(asked, n_graphs):
    """In a process of its own: the stance is that of a process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        assert process.submit(compiled, enable_torch_compile=asked).result() == n_graphs
