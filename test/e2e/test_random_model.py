"""A server of a model whose weights are random and made in its stages."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.attachment import importable, joined
from lab.random_model.attach import ENVIRONMENT, SERVER_ARGS
from lab.random_model.folder import Facts, make
from test.e2e.conftest import Server, running_server
from test.e2e.socket_client import NO_VAD, clip_24k, connected

pytestmark = [pytest.mark.e2e]

SAMPLES_PER_FRAME = 1920  # of 24 kHz, in 80 ms


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "tiny"
    make(folder, "tiny")
    return folder


@pytest.fixture(scope="module")
def server(model) -> Iterator[Server]:
    environment = joined(ENVIRONMENT, importable())
    with running_server(str(model), model.parent, *SERVER_ARGS, environment=environment) as running:
        yield running


async def test_responses_to_speech_have_the_drawn_lengths(server, model):
    facts = Facts.of(model)
    async with connected(server.ws) as socket:
        await socket.session(**NO_VAD)
        for n_tokens in (6, 15):
            before = len(socket.audio())
            done = await socket.say(clip_24k("sp_jfk.flac", 2.0), max_output_tokens=n_tokens)
            assert done["response"]["status"] == "incomplete"  # its model ends no response
            [item] = done["response"]["output"]
            assert len(item["content"][0]["transcript"].split()) == n_tokens
            n_frames = (len(socket.audio()) - before) / SAMPLES_PER_FRAME
            # The vocoder trims less than a frame.
            assert math.ceil(n_frames) == math.ceil(n_tokens * facts.frames_per_token)
