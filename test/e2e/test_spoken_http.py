"""Speech over plain HTTP and in SGLang programs, with real engines."""

import base64
import io

import httpx
import numpy as np
import openai
import pytest
import sglang as sgl
import soundfile as sf

from sglang_live.lang import LiveEndpoint, listen, sound_iter, sound_of, speak
from test.e2e.conftest import DATA, SENTENCES
from test.e2e.socket_client import clip_24k, connected

pytestmark = [pytest.mark.e2e]

SPEECH = DATA / "sp_librivox_0880.flac"
KIND = "conversation.item.input_audio_transcription."


def level_db(samples: np.ndarray) -> float:
    return float(20 * np.log10(np.sqrt(np.mean(np.square(samples.astype(float))))))


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_text_is_spoken(client):
    answer = client.audio.speech.create(
        model="demo", voice="ethan", input=SENTENCES, response_format="wav"
    )
    samples, rate_hz = sf.read(io.BytesIO(answer.content))
    assert rate_hz == 24_000 and len(samples) > 12_000
    assert -40 < level_db(samples) < -10


def test_a_spoken_question_gets_a_spoken_response(client):
    audio = {"data": base64.b64encode(SPEECH.read_bytes()).decode(), "format": "flac"}
    messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}]
    answer = client.chat.completions.create(
        model="demo",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "wav"},
        temperature=0,  # a drawn response may have no text
    )
    said = answer.choices[0].message.audio
    samples, _ = sf.read(io.BytesIO(base64.b64decode(said.data)))
    assert said.transcript and -40 < level_db(samples) < -10
    used = answer.usage
    assert used.prompt_tokens_details.audio_tokens > 30
    # A codec frame is 80 ms.
    assert used.completion_tokens_details.audio_tokens == pytest.approx(len(samples) / 1920, abs=1)


def test_an_answer_of_either_variant_of_chat_continues_both(client):
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "wav"}}
    asked, again = ({"role": "user", "content": text} for text in ("Good morning.", "And now?"))

    def answer(*messages, **fields):
        made = client.chat.completions.create(
            model="demo", messages=messages, max_completion_tokens=12, **fields
        )
        return made.choices[0].message

    for said in (answer(asked), answer(asked, **spoken)):
        for fields in ({}, spoken):
            answer(asked, said.model_dump(), again, **fields)


def test_a_file_is_transcribed_whole_and_in_deltas(client):
    whole = client.audio.transcriptions.create(model="demo", file=SPEECH)
    pieces = list(client.audio.transcriptions.create(model="demo", file=SPEECH, stream=True))
    # Greedy, so both are the same.
    assert whole.text and whole.text == pieces[-1].text
    assert "".join(piece.delta for piece in pieces[:-1]).strip() == whole.text


def wav_of(samples: np.ndarray, subtype: str) -> bytes:
    file = io.BytesIO()
    sf.write(file, samples, 16_000, format="WAV", subtype=subtype)
    return file.getvalue()


def test_a_file_of_floats_has_the_transcript_of_its_integers_and_silence_has_none(client):
    said, _ = sf.read(SPEECH)
    files = [wav_of(said, subtype) for subtype in ("PCM_16", "FLOAT", "DOUBLE")]
    files += [wav_of(np.zeros(160_000), "PCM_16")]
    made = [
        client.audio.transcriptions.create(model="demo", file=("a.wav", file)) for file in files
    ]
    integers, floats, doubles, silence = [one.text for one in made]
    assert integers and floats == doubles == integers
    assert silence == ""


async def test_the_users_speech_is_transcribed(server):
    async with connected(server.ws) as socket:
        wish = {"model": "whisper-1", "language": "en"}
        await socket.session(audio={"input": {"transcription": wish}})
        voice, silence = clip_24k(SPEECH.name), np.zeros(24_000, "<i2")
        await socket.append(np.concatenate([voice, silence]), step=480)
        # A short response may end before the transcription of its question.
        await socket.until_all(KIND + "completed", "response.done")
    kinds = [event["type"] for event in socket.events]
    assert socket.events[kinds.index(KIND + "completed")]["transcript"]
    assert kinds.index("response.output_audio.delta") < kinds.index(KIND + "delta")


async def test_semantic_vad_ends_the_turn_before_silence_would(server):
    """The recording is an excerpt: its pauses may sound complete or incomplete."""
    async with connected(server.ws) as socket:
        detection = {"type": "semantic_vad", "eagerness": "high"}
        await socket.session(audio={"input": {"turn_detection": detection}})
        voice, silence = clip_24k("sp_jfk.flac"), np.zeros(3 * 24_000, "<i2")
        await socket.append(np.concatenate([voice, silence]), step=480)
        await socket.until("response.done")
    verdicts = httpx.get(f"{server.http}/metrics").text
    judged = [line for line in verdicts.splitlines() if "endpoint_verdicts_total{" in line]
    assert judged and not any('"failed"' in line for line in judged)


@sgl.function
def converse(s, clip):
    s += sgl.system("Be brief.")
    s += sgl.user(listen(clip))
    s += sgl.assistant(speak("answer", voice="ethan", max_new_tokens=16))
    s += sgl.user("In writing?")
    s += sgl.assistant(sgl.gen("written", max_tokens=8))


def test_a_program_with_audio_and_text_runs(server):
    state = converse.run(clip=SPEECH, backend=LiveEndpoint(server.http))
    assert state["answer"]
    # With random weights the model may write special tokens alone, which are no text.
    assert state.get_meta_info("written")["finish_reason"] in ("stop", "length")
    assert -40 < level_db(sound_of(state, "answer") / 32768) < -10


def test_a_program_streams_its_audio(server):
    state = converse.run(clip=SPEECH, backend=LiveEndpoint(server.http), stream=True)
    pieces = list(sound_iter(state, "answer"))
    assert len(pieces) > 2
    np.testing.assert_array_equal(np.concatenate(pieces), sound_of(state, "answer"))


def test_the_stages_are_free_afterwards(server):
    server.wait_until_free()
