"""Hidden states leave the thinker once, whatever the number of its ranks."""

from types import SimpleNamespace

from torch import nn

from sglang_live.engine_channel.inbox import OUTBOX_ENV
from sglang_live.models.qwen3_omni.engine import thinker as module


def test_the_first_rank_alone_sends_hidden_states(monkeypatch):
    def fake_init(thinker, config, quant_config, prefix):
        nn.Module.__init__(thinker)
        thinker.thinker = SimpleNamespace(model=nn.Module(), is_mrope_enabled=True)

    senders: list[str] = []
    config = SimpleNamespace(
        talker_config=SimpleNamespace(accept_hidden_layer=2, position_id_per_seconds=13)
    )
    monkeypatch.setattr(module.UpstreamThinker, "__init__", fake_init)
    monkeypatch.setattr(module, "RowsOutbox", senders.append)
    monkeypatch.setenv(OUTBOX_ENV, "ipc:///absent")
    for rank in (1, 0):
        parallel = SimpleNamespace(tp_rank=rank)
        monkeypatch.setattr(module, "get_parallel", lambda own=parallel: own, raising=False)
        thinker = module.Qwen3OmniMoeForConditionalGeneration(config)
        # Every rank computes them, because that may communicate.
        assert thinker.thinker.model.layers_to_capture == [2]
        assert len(senders) == (rank == 0)
