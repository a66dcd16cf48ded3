"""Claims that hold for every variant of the stages; test files run them on their variant."""

import asyncio

import numpy as np

from sglang_live.messages import CloseSession
from test.engine.conftest import Stages
from test.engine.reference import AUDIO, Reference, chat
from test.engine.turns import greedy_turn, reply_of, speak, think, user

SYSTEM = "You are a kind assistant."


async def thinker_matches_the_reference_on_audio(
    stages: Stages, reference: Reference, clips
) -> None:
    for i, clip in enumerate(clips):
        expected = reference.think(reference.inputs(chat(SYSTEM, ("user", AUDIO)), [clip]), 24)
        links = stages.links(f"hear-{i}-{id(clip)}")
        done = await think(links, greedy_turn(user(clip), system=SYSTEM, n_tokens=24))
        links.close()
        assert done.ids == expected
        assert done.n_audio > 0


async def turns_equal_one_stateless_run(stages: Stages, reference: Reference, speech) -> None:
    """Audio, text with audio, text: each turn has all history and prefills only new tokens."""
    links = stages.links(f"turns-{id(speech)}")
    clips = [speech[:32_000], speech[32_000:84_800]]
    asked = [user(clips[0]), user("and ", clips[1], " what"), user("go on")]
    texts = [AUDIO, f"and {AUDIO} what", "go on"]
    history, chat_turns, n_tokens_before = [], [], 0
    for item, text in zip(asked, texts, strict=True):
        history.append(item)
        chat_turns.append(("user", text))
        heard = clips[: sum(t.count(AUDIO) for _, t in chat_turns)]
        turn = greedy_turn(*history, system=SYSTEM, n_tokens=16)
        done = await think(links, turn)
        inputs = reference.inputs(chat(SYSTEM, *chat_turns), heard)
        # The response is inserted as ids: its text may tokenise to others.
        expected = _think_after(reference, inputs, [h.token_ids for h in history if h.token_ids])
        assert done.ids == expected
        assert done.n_cached >= n_tokens_before
        n_tokens_before = done.n_prompt
        history.append(reply_of(turn, done))
        chat_turns.append(("assistant", "@@"))
    links.close()


def _think_after(reference: Reference, inputs: dict, responses: list[tuple[int, ...]]) -> list[int]:
    import torch

    tokenizer = reference.processor.tokenizer
    mark = tokenizer.encode("@@", add_special_tokens=False)
    ids = inputs["input_ids"][0].tolist()
    for response in responses:
        at = next(i for i in range(len(ids)) if ids[i : i + len(mark)] == mark)
        ids[at : at + len(mark)] = response
    inputs["input_ids"] = torch.tensor([ids])
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return reference.think(inputs, 16)


async def talker_matches_the_reference(
    stages: Stages, reference: Reference, speech, n_frames: int
) -> None:
    expected = reference.speak(
        reference.inputs(chat(SYSTEM, ("user", AUDIO)), [speech[:48_000]]), 40, n_frames
    )
    links = stages.links(f"speak-{n_frames}-{id(speech)}")
    turn = greedy_turn(user(speech[:48_000]), system=SYSTEM, n_tokens=40)
    done = await think(links, turn)
    reply_ids, codes = expected
    assert done.ids == reply_ids
    heard = await speak(links, turn, reply_ids[:-1], n_frames)
    links.close()
    np.testing.assert_array_equal(heard, codes[:n_frames])


async def a_talker_that_lost_a_session_receives_its_messages_again(stages: Stages, speech) -> None:
    links = stages.links("lost")
    turn = greedy_turn(user(speech[:48_000]), system=SYSTEM, n_tokens=12)
    done = await think(links, turn)
    first = await speak(links, turn, done.ids, 10)
    client = stages.replica("talker").client
    before = (await client.ping(10.0)).load
    client.send_later(CloseSession("lost"))
    again = await speak(links, turn, done.ids, 10)
    np.testing.assert_array_equal(again, first)
    load = (await client.ping(10.0)).load
    assert load["states_bytes"] == before["states_bytes"] > 0
    links.close()


async def eight_starving_streams_match(
    stages: Stages, reference: Reference, speech, n_frames: int
) -> None:
    """Eight responses at once, starting and running out of text at different times."""
    jobs = []
    for i in range(8):
        clip = speech[8_000 * i : 8_000 * i + 24_000 + 1_600 * i]
        inputs = reference.inputs(chat(SYSTEM, ("user", AUDIO)), [clip])
        reply_ids, codes = reference.speak(inputs, 12 + 3 * i, n_frames)
        links = stages.links(f"eight-{i}-{n_frames}")
        turn = greedy_turn(user(clip), system=SYSTEM, n_tokens=len(reply_ids))
        done = await think(links, turn)
        assert done.ids == reply_ids
        pace_s = 0.0 if i == 3 else 0.03 + 0.02 * i
        jobs.append((links, turn, reply_ids, codes, 0.1 * i, pace_s))
    heard = await asyncio.gather(
        *(
            speak(links, turn, ids[:-1], n_frames, start_after_s=start, token_every_s=pace)
            for links, turn, ids, _, start, pace in jobs
        )
    )
    for (links, _, _, codes, _, _), got in zip(jobs, heard, strict=True):
        links.close()
        np.testing.assert_array_equal(got, codes[:n_frames])
