"""Requests to speak a text on a modelled device."""

import numpy as np
import pytest

from benchmark.speaking import (
    FAMILIES,
    MEAN_S,
    Server,
    model_of,
    simulate,
    speeches,
    stream_of,
)
from benchmark.speaking_models import SHAPES
from benchmark.speaking_table import speaking_rates, speaking_table


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_alone_waits_for_its_prompt_and_its_first_chunk(name):
    family, model = FAMILIES[name], model_of(name)
    server, [speech] = Server(name, "off"), speeches(family, 100.0, 1, 0.02)[:1]
    first, _ = speech.pieces[0]
    server.take(speech)
    server.events.run()
    assert speech.n_sounded == speech.n_frames and not any(speech.late)
    if family.rule is None:
        n_frames = 2 * -(-(1 + family.n_ahead) // 2)  # of chunks of two
    else:
        n_frames = min(family.rule.first, first)
    least_s = model.talker.prefill_s(family.n_prefix, 0.0) + model.vocoder.decode_s(1)
    least_s += (family.n_steps(n_frames) - 1) * model.talker.decode_s(1, 0)
    computed_s = 0.0
    if model.eager is not None:
        computed_s = model.eager.decode_s(1, family.n_prompt + n_frames)
        least_s += max(computed_s, model.eager.launch_ms / 1e3)
    # What comes after the first chunk shares the device with it, by slices at most half of it.
    assert least_s < speech.first_s < max(1.3 * least_s, least_s + computed_s) + 0.06


def test_texts_are_as_long_as_those_of_the_corpus_and_come_at_the_rate():
    family = FAMILIES["csm"]
    found = speeches(family, 8.0, 3, 600.0)
    assert len(found) == pytest.approx(4800, rel=0.05)
    lengths = [one.n_frames * family.frame_s for one in found]
    assert np.mean(lengths) == pytest.approx(MEAN_S, rel=0.05)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_and_frames_of_a_family_fit_each_other(name):
    family = FAMILIES[name]
    for n_frames in (1, 25, 26, 27, 160):
        n_steps = family.n_steps(n_frames)
        assert family.n_frames(n_steps) == n_frames > family.n_frames(n_steps - 1)


def test_a_text_of_glm_4_voice_begins_before_its_codes():
    family = FAMILIES["glm4_voice"]
    assert [family.n_frames(n) for n in (13, 14, 39, 52, 53)] == [0, 1, 26, 26, 27]
    assert family.step_s == pytest.approx(0.08 * 26 / 39)


def test_chatterbox_speaks_its_first_words_before_the_rest():
    family = FAMILIES["chatterbox"]
    found = [one for one in speeches(family, 10.0, 1, 30.0) if len(one.pieces) == 2]
    assert found and all(one.pieces[0][1] == family.first_words for one in found)
    assert all(sum(n for n, _ in one.pieces) == one.n_frames for one in found)
    server, speech = Server("chatterbox", "all"), found[0]
    (first, _), (rest, _) = speech.pieces
    sizes: list[float] = []
    hear = speech.hear
    speech.hear = lambda now_s, audio_s: (sizes.append(audio_s), hear(now_s, audio_s))[1]
    server.take(speech)
    server.events.run()
    assert sizes == pytest.approx([0.04 * first, 0.04 * rest])


@pytest.mark.parametrize("arm", ["off", "all"])
def test_more_requests_wait_longer_until_streams_are_late(arm):
    slow, fast, beyond = (
        simulate("orpheus", arm, rate, range(1), 10.0) for rate in (1.0, 8.0, 40.0)
    )
    assert slow.is_within and slow.smooth == slow.in_time == 1.0
    assert slow.first_audio_p90_ms < fast.first_audio_p90_ms < beyond.first_audio_p90_ms
    assert not beyond.is_within


def test_naive_servers_wait_longer():
    off, request, chunk = (
        simulate("cosyvoice2_tf32", arm, 2.0, range(1), 20.0)
        for arm in ("off", "one-request", "one-chunk")
    )
    assert off.first_audio_p90_ms < chunk.first_audio_p90_ms < request.first_audio_p90_ms
    assert request.most_running == 1 < off.most_running


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_a_source_for_every_figure_and_a_bound(name):
    figures, facts = SHAPES[name].figures, SHAPES[name].facts()
    kinds = ("derived", "published", "estimate", "config", "LLAMA", "NVIDIA")
    assert [n for n, f in figures.items() if not f.source.startswith(kinds)] == []
    assert set(facts["estimates"]) <= set(figures) == set(facts["figures"])
    stream = stream_of(name)
    assert 0 < stream.fit <= 128 and min(stream.device_rate, stream.launch_rate) > 0


def test_a_flow_in_float32_is_the_bound_of_cosyvoice():
    exact, half = (stream_of(name) for name in ("cosyvoice2", "cosyvoice2_graphs"))
    assert exact.device_rate < half.device_rate / 2


def test_graphs_take_launches_from_the_thread_and_pad_what_the_device_computes():
    eager, graphs = (SHAPES[name].model.eager for name in ("cosyvoice2_eager", "cosyvoice2"))
    assert eager is not None and graphs is not None
    assert graphs.launch_ms < eager.launch_ms / 10
    assert graphs.decode_s(5, 170) == eager.decode_s(6, 192)
    # Beyond the largest graph it is launched kernel by kernel.
    assert graphs.decode_s(1, 1_100) == max(eager.decode_s(1, 1_100), eager.launch_ms / 1e3)


def test_the_tables_have_the_highest_rate_within_the_limits_and_every_rate():
    def row(rate: float, p90: float, smooth: float) -> dict:
        return {
            "family": "csm",
            "arm": "off",
            "rate": rate,
            "first_audio_p90_ms": p90,
            "first_audio_p99_ms": p90 + 50,
            "in_time": 1.0,
            "smooth": smooth,
        }

    document = {
        "device": "cpu",
        "git_commit": "0123456789ab",
        "git_dirty": False,
        "device_models": {"csm": {"modelled_device": "a GPU, CSM in bf16"}},
        "streams": {
            "csm": {
                "kv_mb": 4,
                "decoder_mb": 1.5,
                "fit": 128,
                "device_rate": 9.0,
                "launch_rate": 7.5,
            }
        },
        "rows": [row(1, 200, 1.0), row(2, 450, 0.99), row(4, 480, 0.9), row(6, 700, 1.0)],
    }
    assert speaking_table([document])[2] == "| `csm` | 2 | – | – | 7.5 |"
    rates = speaking_rates([document])
    assert rates[2].startswith("| CSM in bf16 | 4 KV, 1.5 decoder; 128 | `off` | 1: 200 / 250, 100")
    assert rates[2].count(";") == 1 + 3
    document["rows"] = [row(1, 600, 1.0)]
    assert speaking_table([document])[2] == ""
