"""Requests to speak a text on a modelled device."""

import numpy as np
import pytest

from benchmark.speaking import FAMILIES, MEAN_S, Server, simulate, speeches


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_alone_waits_for_its_prompt_and_its_first_chunk(name):
    family = FAMILIES[name]
    server, [speech] = Server(family, "off"), speeches(family, 100.0, 1, 0.02)[:1]
    server.take(speech)
    server.events.run()
    assert speech.n_sounded == speech.n_frames and not any(speech.late)
    talker, model = family.model.talker, family.model
    n_frames = 2 * -(-(1 + family.n_ahead) // 2)  # of chunks of two
    least_s = talker.prefill_s(speech.request.prompt_tokens, 0.0) + model.vocoder.decode_s(1)
    least_s += (n_frames * family.steps_per_frame - 1) * talker.decode_s(1, 0)
    assert least_s < speech.first_s + speech.came_s < least_s + 0.06


def test_texts_are_as_long_as_those_of_the_corpus_and_come_at_the_rate():
    family = FAMILIES["csm"]
    found = speeches(family, 8.0, 3, 600.0)
    assert len(found) == pytest.approx(4800, rel=0.05)
    lengths = [one.n_frames * family.frame_s for one in found]
    assert np.mean(lengths) == pytest.approx(MEAN_S, rel=0.05)


@pytest.mark.parametrize("arm", ["off", "all"])
def test_more_requests_wait_longer_until_streams_are_late(arm):
    slow, fast, beyond = (
        simulate("orpheus", arm, rate, range(1), 10.0) for rate in (1.0, 8.0, 40.0)
    )
    assert slow.is_within and slow.smooth == slow.in_time == 1.0
    assert slow.first_audio_p90_ms < fast.first_audio_p90_ms < beyond.first_audio_p90_ms
    assert not beyond.is_within
