"""Turn prefill: chunks of a long utterance are prefilled; the item is one message."""

import asyncio

import numpy as np
import pytest

from sglang_live.core import INPUT_RATE_HZ, AudioPart
from sglang_live.gateway.call.settings import TurnConfig
from sglang_live.gateway.call.turns.turn_prefill import TurnPrefill
from sglang_live.gateway.config import GatewayConfig
from sglang_live.gateway.realtime.session_config import first_config
from sglang_live.interaction.input_buffer import InputBuffer
from sglang_live.interaction.turn_end import PAUSE_MS
from test.unit.gateway.fakes import FakeOrchestrator, connected, services, spoken, tone

SECOND = INPUT_RATE_HZ
CONFIG = first_config(FakeOrchestrator(), GatewayConfig())


class Turn:
    """An utterance that begins at a sample of the buffer, and a prefill that may refuse."""

    def __init__(self, chunk_s: float = 1.0, start: int = 0, preheats: bool = False):
        self.buffer, self.start = InputBuffer(600.0), start
        self.buffer.append(np.zeros(start, np.int16))
        self.prefilled: list[int] = []
        self.accepts = True
        self.prefill = TurnPrefill(
            TurnConfig(turn_prefill_s=chunk_s or None, preheat=preheats), self
        )
        self._rng = np.random.default_rng(1)

    def prefill_turn(self, config, chunks) -> bool:
        """As of a TurnRunner."""
        if self.accepts:
            self.prefilled.append(len(chunks))
        return self.accepts

    def say(self, seconds: float) -> None:
        pcm = self._rng.integers(-9999, 9999, round(seconds * SECOND), np.int16)
        self.buffer.append(pcm)
        self.prefill.grow(CONFIG, self.buffer, self.start)

    def end(self, left_out_s: float = 0.0) -> tuple[AudioPart, tuple]:
        end = self.buffer.end_sample - round(left_out_s * SECOND)
        audio = AudioPart(self.buffer.peek(self.start, end))
        return audio, self.prefill.finish(audio)


def joined(chunks) -> np.ndarray:
    return np.concatenate([chunk.parts[0].pcm for chunk in chunks])


@pytest.mark.parametrize("start", [0, 7777])
def test_chunks_join_to_the_utterance(start):
    turn = Turn(start=start)
    for _ in range(34):
        turn.say(0.1)
    assert turn.prefilled == [1, 2, 3]
    audio, chunks = turn.end()
    assert np.array_equal(joined(chunks), audio.pcm)
    assert [len(chunk.parts[0].pcm) for chunk in chunks] == [SECOND] * 3 + [round(0.4 * SECOND)]
    assert [(chunk.opens, chunk.closes) for chunk in chunks] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_a_chunk_keeps_the_key_it_was_prefilled_with():
    turn = Turn()
    names = []
    turn.prefill_turn = lambda config, p: names.append([x.key for x in p]) or True
    turn.say(2.5)
    _, chunks = turn.end()
    assert [chunk.key for chunk in chunks][:2] == names[-1]


def test_a_short_utterance_is_not_split():
    turn = Turn(chunk_s=8.0)
    turn.say(8.0)
    assert turn.end()[1] == () and turn.prefilled == []


def test_chunks_that_were_not_prefilled_are_not_split_off():
    turn = Turn()
    turn.accepts = False
    turn.say(2.5)
    assert turn.end()[1] == ()
    turn.accepts, turn.start = True, turn.buffer.end_sample
    turn.say(1.5)
    assert turn.prefilled == [1], "the next turn begins with its first chunk"


def test_an_utterance_that_ended_before_its_last_chunk_leaves_that_out():
    turn = Turn()
    turn.say(3.3)
    audio, chunks = turn.end(left_out_s=0.5)
    assert np.array_equal(joined(chunks), audio.pcm)
    assert len(chunks) == 3


def test_without_a_chunk_size_nothing_is_prefilled():
    turn = Turn(chunk_s=0.0)
    turn.say(30.0)
    assert turn.end()[1] == () and turn.prefilled == []


# --- preheat ---


def test_the_conversation_is_preheated_once_before_the_first_chunk():
    turn = Turn(preheats=True)
    turn.prefill.begin()
    for _ in range(12):
        turn.say(0.1)
    assert turn.prefilled == [0]
    turn.say(0.2)
    assert turn.prefilled == [0, 1]
    assert len(turn.end()[1]) == 2


def test_a_refused_preheat_is_tried_again():
    turn = Turn(chunk_s=0.0, preheats=True)
    turn.prefill.begin()
    turn.accepts = False
    turn.say(0.1)
    turn.accepts = True
    turn.say(0.1)
    turn.say(0.1)
    assert turn.prefilled == [0]
    assert turn.end()[1] == ()


def test_there_is_no_preheat_without_its_policy_or_before_speech():
    without, silent = Turn(), Turn(preheats=True)
    without.prefill.begin()
    for turn in (without, silent):
        turn.say(0.5)
        assert turn.prefilled == []


# --- at pauses ---


class PausedTurn(Turn):
    def __init__(self):
        super().__init__(chunk_s=0.0)
        self.prefill = TurnPrefill(TurnConfig(prefills_at_pauses=True), self)

    def pause(self, silent_s: float = 0.2) -> None:
        """The user falls silent, which is detected after silent_s."""
        end = self.buffer.end_sample
        self.say(silent_s)
        self.prefill.pause(CONFIG, self.buffer, self.start, end)


def test_all_speech_is_prefilled_in_the_silence_that_ends_the_turn():
    turn = PausedTurn()
    turn.say(1.4)
    turn.pause()
    assert turn.prefilled == [1]
    turn.say(0.3)
    audio, (speech, end) = turn.end()
    assert np.array_equal(speech.parts[0].pcm, audio.pcm[: round(1.4 * SECOND)])
    assert (speech.opens, speech.closes) == (True, False)
    # The rest is silence, in which a recogniser would hear words.
    assert (end.opens, end.closes, end.parts) == (False, True, ())


def test_a_short_chunk_is_given_up_when_the_user_goes_on_and_a_long_one_is_kept():
    turn = PausedTurn()
    turn.say(1.0)
    turn.pause()
    turn.prefill.resume(300)
    turn.say(3.0)
    turn.pause()
    turn.prefill.resume(300)
    turn.say(0.8)
    turn.pause()
    assert turn.prefilled == [1, 1, 2]
    audio, chunks = turn.end()
    lengths = [len(chunk.parts[0].pcm) / SECOND for chunk in chunks[:-1]]
    assert lengths == pytest.approx([4.2, 1.0])
    assert chunks[-1].parts == ()
    assert np.array_equal(joined(chunks[:-1]), audio.pcm[: -round(0.2 * SECOND)])


def test_a_chunk_is_given_up_after_a_short_pause_unless_it_is_long():
    turn = PausedTurn()
    turn.say(4.0)
    turn.pause()
    turn.prefill.grow(CONFIG, turn.buffer, turn.start, PAUSE_MS - 1)
    assert turn.prefill.final_clips == ()
    turn.prefill.grow(CONFIG, turn.buffer, turn.start, PAUSE_MS)
    assert len(turn.prefill.final_clips) == 1
    turn.prefill.resume(PAUSE_MS - 1)
    turn.say(4.5)
    turn.pause()
    turn.prefill.resume(PAUSE_MS - 1)
    turn.say(1.0)
    turn.pause()
    assert turn.prefilled == [1, 1, 2]
    [final] = turn.prefill.final_clips
    assert len(final.pcm) / SECOND == pytest.approx(8.7)
    audio, chunks = turn.end()
    assert np.array_equal(joined(chunks[:-1]), audio.pcm[: -round(0.2 * SECOND)])


def test_a_turn_that_ends_without_a_pause_has_its_rest_as_speech():
    turn = PausedTurn()
    turn.say(4.0)
    turn.pause()
    turn.prefill.resume(300)
    turn.say(2.0)
    audio, chunks = turn.end()
    assert np.array_equal(joined(chunks), audio.pcm)
    assert [len(chunk.parts[0].pcm) / SECOND for chunk in chunks] == pytest.approx([4.0, 2.2])


def test_a_refused_prefill_leaves_the_turn_whole():
    turn = PausedTurn()
    turn.accepts = False
    turn.say(2.0)
    turn.pause()
    assert turn.end()[1] == ()


# --- in a session ---


def eager(orchestrator: FakeOrchestrator):
    return services(orchestrator, turn_prefill_s=1.0)


async def test_a_session_prefills_the_utterance_and_its_turn_has_the_same_chunks():
    orchestrator = FakeOrchestrator([spoken("Yes.")])
    async with connected(orchestrator, eager(orchestrator)) as client:
        client.append(tone(2600) + bytes(48_000))
        await client.until("response.done")
        prefilled, [turn] = orchestrator.session.prefilled, orchestrator.turns
    assert prefilled and all(t.prefill_only and not t.stateless for t in prefilled)
    assert not turn.prefill_only
    keys = [item.key for item in turn.history]
    assert [item.key for item in prefilled[-1].history] == keys[: len(prefilled[-1].history)]
    assert len(keys) == len(prefilled[-1].history) + 1
    assert len(joined(turn.history)) / SECOND == pytest.approx(3.2, abs=0.4)


async def test_while_a_response_is_made_nothing_is_prefilled():
    gate = asyncio.Event()
    orchestrator = FakeOrchestrator([[gate, *spoken("Yes.")], spoken("And yes.")])
    async with connected(orchestrator, eager(orchestrator)) as client:
        client.turn_detection({"type": "server_vad", "interrupt_response": False})
        await client.expect("session.updated")
        client.append(tone(600) + bytes(48_000))
        await client.until("response.created")
        client.append(tone(2600))
        await client.settle()
        assert orchestrator.session.prefilled == []
        gate.set()
        await client.until("response.done")


async def test_a_session_preheats_its_conversation_when_its_user_begins_to_speak():
    orchestrator = FakeOrchestrator([spoken("Yes."), spoken("And yes.")])
    async with connected(orchestrator, preheat=True) as client:
        client.append(tone(600) + bytes(48_000))
        await client.until("response.done")
        [first] = orchestrator.session.prefilled  # the instructions alone
        assert first.preheat and first.history == ()
        client.append(tone(600) + bytes(48_000))
        await client.until("response.done")
    [_, preheat], turns = orchestrator.session.prefilled, orchestrator.turns
    assert preheat.prefill_only and preheat.preheat
    keys = [item.key for item in turns[1].history]
    assert [item.key for item in preheat.history] == keys[:-1]


async def test_with_a_recogniser_the_turn_and_its_transcript_have_what_was_heard_in_the_pause():
    orchestrator = FakeOrchestrator([spoken("Yes."), spoken("hello")])
    async with connected(orchestrator, prefills_at_pauses=True) as client:
        client.send(
            "session.update",
            session={
                "type": "realtime",
                "audio": {"input": {"transcription": {"model": "whisper-1"}}},
            },
        )
        await client.expect("session.updated")
        client.append(tone(900) + bytes(48_000))
        await client.until("conversation.item.input_audio_transcription.completed")
    [prefilled], [turn, transcript] = orchestrator.session.prefilled, orchestrator.turns
    speech, end = turn.history
    assert [item.key for item in prefilled.history] == [speech.key] and end.parts == ()
    clip, _ = transcript.history[0].parts
    assert np.array_equal(clip.pcm, speech.parts[0].pcm)
