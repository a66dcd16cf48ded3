"""With pictures and videos, thinker and talker have transformers' tokens and codes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from sglang_live.core import VideoPart
from sglang_live.models.demo.build import build
from sglang_live.models.demo.location import DemoSize
from test.engine.conftest import running_stages
from test.engine.reference import AUDIO, IMAGE, VIDEO, Reference, chat
from test.engine.turns import greedy_turn, reply_of, speak, think, user
from test.pictures import noise, part_of
from test.videos import noise_video

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = "You are a kind assistant."
# As the processor leaves them: sides are multiples of 32.
SQUARE, WIDE, TALL = noise(96, 96, seed=1), noise(256, 64, seed=2), noise(64, 160, seed=3)

# An odd number of frames, of which the processor repeats the last one.
FILM, LONG_FILM = noise_video(5, 480, 288, seed=4), noise_video(12, 320, 448, seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """The talker hears of a layer behind those to which the vision tower adds, as in Qwen3-Omni."""
    path = tmp_path_factory.mktemp("sees")
    build(path, DemoSize(thinker_layers=8, thinker_end_logit=0.0, talker_end_logit=0.0))
    return path


@pytest.fixture(scope="module")
def seeing(checkpoint) -> Reference:
    loaded = Reference.load(checkpoint)
    # transformers 5.19 reads it for audio beside pictures, and the talker's configuration lacks it.
    loaded.model.talker.config.audio_config = loaded.model.thinker.config.audio_config
    return loaded


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stages(checkpoint, tmp_path_factory):
    cache = tmp_path_factory.mktemp("stages")
    async with running_stages(checkpoint, cache, names=("thinker", "talker")) as running:
        yield running


async def test_thinker_matches_the_reference_on_pictures(stages, seeing, speech):
    clip = speech[:20_000]
    cases = [
        ([part_of(SQUARE)], IMAGE, [], [SQUARE]),
        (["what is ", part_of(WIDE), " this"], f"what is {IMAGE} this", [], [WIDE]),
        ([part_of(TALL), part_of(SQUARE)], IMAGE + IMAGE, [], [TALL, SQUARE]),
        ([clip, part_of(TALL), "and"], f"{AUDIO}{IMAGE}and", [clip], [TALL]),
        ([part_of(WIDE), clip], IMAGE + AUDIO, [clip], [WIDE]),
        ([FILM], VIDEO, [], []),
        (["see ", LONG_FILM, " there"], f"see {VIDEO} there", [], []),
        ([clip, FILM, part_of(TALL), clip], AUDIO + VIDEO + IMAGE + AUDIO, [clip, clip], [TALL]),
        ([FILM, LONG_FILM], VIDEO + VIDEO, [], []),
    ]
    for n, (parts, text, clips, pictures) in enumerate(cases):
        videos = [part.frames for part in parts if isinstance(part, VideoPart)]
        inputs = seeing.inputs(chat(SYSTEM, ("user", text)), clips, pictures, videos)
        links = stages.links(f"see-{n}")
        done = await think(links, greedy_turn(user(*parts), system=SYSTEM, n_tokens=24))
        links.close()
        assert done.ids == seeing.think(inputs, 24)
        assert done.n_image == (inputs["input_ids"] == seeing.image_id).sum()
        assert done.n_video == (inputs["input_ids"] == seeing.video_id).sum()
        assert (done.n_audio > 0) == bool(clips)


async def test_other_pictures_have_other_responses(stages):
    said = []
    for seed in (1, 9):
        links = stages.links(f"differs-{seed}")
        item = user(part_of(noise(96, 96, seed)))
        said.append((await think(links, greedy_turn(item, system=SYSTEM, n_tokens=24))).ids)
        links.close()
    assert said[0] != said[1]


async def test_talker_matches_the_reference_on_pictures(stages, seeing, speech):
    """Two messages with pictures: those behind a picture have positions that count on it."""
    clip = speech[:20_000]
    text = chat(SYSTEM, ("user", f"see {IMAGE} and {AUDIO}"), ("user", f"{IMAGE} then {IMAGE}"))
    inputs = seeing.inputs(text, [clip], [WIDE, TALL, SQUARE])
    reply_ids, codes = seeing.speak(inputs, 30, 60)
    history = [
        user("see ", part_of(WIDE), " and ", clip),
        user(part_of(TALL), " then ", part_of(SQUARE)),
    ]
    links = stages.links("speak")
    turn = greedy_turn(*history, system=SYSTEM, n_tokens=30)
    done = await think(links, turn)
    assert done.ids == reply_ids
    heard = await speak(links, turn, reply_ids[:-1], 60)
    links.close()
    np.testing.assert_array_equal(heard, codes[:60])


async def test_talker_matches_the_reference_on_a_video(stages, seeing, speech):
    clip = speech[:20_000]
    text = chat(SYSTEM, ("user", f"see {VIDEO} and {AUDIO}"), ("user", f"{IMAGE} then"))
    inputs = seeing.inputs(text, [clip], [TALL], [FILM.frames])
    reply_ids, codes = seeing.speak(inputs, 30, 60)
    history = [user("see ", FILM, " and ", clip), user(part_of(TALL), " then")]
    links = stages.links("speak-video")
    turn = greedy_turn(*history, system=SYSTEM, n_tokens=30)
    done = await think(links, turn)
    assert done.ids == reply_ids
    heard = await speak(links, turn, reply_ids[:-1], 60)
    links.close()
    np.testing.assert_array_equal(heard, codes[:60])


async def test_a_conversation_that_is_built_anew_keeps_its_pictures(stages):
    links, alone = stages.links("grows"), stages.links("")
    history = []
    for n, image in enumerate((SQUARE, WIDE, TALL)):
        history.append(user(f"look {n}", part_of(image)))
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=12)
        done = await think(links, turn)
        fresh = await think(alone, greedy_turn(*history, system=SYSTEM, n_tokens=12))
        assert (done.ids, done.n_prompt) == (fresh.ids, fresh.n_prompt)
        assert fresh.n_image > done.n_image or n == 0
        # Not all of it was heard, so the next turn builds the session anew.
        ids = tuple(done.ids[:5])
        history.append(replace(reply_of(turn, done), key=f"heard-{n}", token_ids=ids))
    assert done.rebuilt
    links.close()
