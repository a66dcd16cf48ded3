"""KV pressure in the whole server: the modelled link, and what the thinker has counted."""

import asyncio

from benchmark.load import kv_use
from benchmark.load.kv_use import KvUse
from benchmark.voice_pressure import Options, device_model, hidden_share
from sglang_live.extensions.planner.device_model.model import H100, load_device_model


def test_a_link_of_another_speed_is_named_in_the_device(tmp_path):
    options = Options(device_model=str(H100), link_gb_per_s=1.5)
    own, copy = load_device_model(H100), load_device_model(device_model(options, tmp_path))
    assert copy.link.to_device_gb_per_s == copy.link.to_host_gb_per_s == 1.5
    assert copy.name == own.name + ", link of 1.5 GB/s"
    assert (copy.thinker, copy.talker, copy.vocoder) == (own.thinker, own.talker, own.vocoder)
    assert device_model(Options(device_model=str(H100)), tmp_path) == H100
    assert device_model(Options(), tmp_path) is None


def metrics(used: float, idle: float, preloaded: float) -> str:
    values = {
        "kv_tokens_used": used,
        "policy_tokens_idle": idle,
        "policy_tokens_preloaded": preloaded,
    }
    labels = 'replica="0",stage="thinker",what='
    return "".join(
        f'sglang_live_stage_load{{{labels}"{name}"}} {value}\n' for name, value in values.items()
    )


def test_kv_is_counted_over_the_run_and_its_most_is_kept(monkeypatch):
    monkeypatch.setattr(kv_use, "PING_S", 0.0)
    monkeypatch.setattr(kv_use, "_PERIOD_S", 0.0)
    texts = [metrics(0, 0, 100), metrics(300, 50, 150), metrics(900, 200, 200)]
    end = metrics(100, 400, 350)

    async def run() -> tuple[int, dict[str, float]]:
        kv = KvUse(lambda: texts.pop(0) if texts else end)
        kv.begin()
        sampling = asyncio.create_task(kv.keep_sampling())
        async with asyncio.timeout(10):
            while kv.most_tokens < 1100:
                await asyncio.sleep(0)
        sampling.cancel()
        return kv.most_tokens, await kv.end()

    most, counted = asyncio.run(run())
    assert most == 1100
    assert counted == {"tokens_idle": 400.0, "tokens_preloaded": 250.0}


def test_tokens_are_hidden_that_no_request_waited_for():
    assert hidden_share({"tokens_loaded": 100.0, "tokens_preloaded": 300.0}) == 0.75
    assert hidden_share({"tokens_evicted": 5.0}) is None
