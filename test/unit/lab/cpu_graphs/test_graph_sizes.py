"""Sizes of the captured graphs, and where they are attached."""

import pytest

from lab.cpu_graphs import attach as attaching
from lab.cpu_graphs.attach import (
    GRAPHS_ENV,
    PREFILL_ENV,
    PREFILL_SEAMS,
    SEAMS,
    UPSTREAM,
    capture_on,
    environment,
    graph_sizes,
)
from lab.upstream.comparison import differences
from sglang_live.bridge.platform import cpu
from sglang_live.bridge.seams import upstream_signature


@pytest.mark.parametrize(("text", "sizes"), [("4", [4]), ("8, 1,2,2", [1, 2, 8])])
def test_captured_sizes_come_from_the_environment(monkeypatch, text, sizes):
    monkeypatch.setenv(GRAPHS_ENV, text)
    assert graph_sizes() == sizes
    assert environment(sizes)[GRAPHS_ENV] == ",".join(map(str, sizes))
    assert PREFILL_ENV not in environment(sizes)
    monkeypatch.setenv(PREFILL_ENV, environment(sizes, prefill=(16, 8))[PREFILL_ENV])
    assert graph_sizes(PREFILL_ENV) == [8, 16]


@pytest.mark.parametrize("text", ["", "on", "0", "1,,2", "-1", "1.5", "1 2"])
def test_captured_sizes_of_another_form_are_refused(monkeypatch, text):
    monkeypatch.setenv(GRAPHS_ENV, text)
    with pytest.raises(ValueError, match=GRAPHS_ENV):
        graph_sizes()


def test_sglang_has_what_graphs_need():
    assert [text for names in UPSTREAM for text in differences(names)] == []
    assert all(upstream_signature(seam) == seam.signature for seam in [*SEAMS, *PREFILL_SEAMS])


def test_only_where_it_is_attached_a_platform_captures():
    class Platform(type(cpu.CpuReferencePlatform())):
        pass

    assert not Platform().capabilities.graph_capture
    capture_on(Platform, [1, 2])
    assert Platform().capabilities.graph_capture
    assert not cpu.CpuReferencePlatform().capabilities.graph_capture


def test_weights_that_int8_replaces_are_not_captured(monkeypatch):
    monkeypatch.setenv(GRAPHS_ENV, "1")
    monkeypatch.setattr(attaching, "wants_int8", lambda: True)
    monkeypatch.setattr(cpu, "is_active", lambda: True)
    with pytest.raises(ValueError, match="int8"):
        attaching.attach("stage")
