"""Transcripts with times, and translations, over plain HTTP."""

import io
import math

import httpx
import numpy as np
import pytest
import soundfile as sf
from openai import AsyncOpenAI

from sglang_live.core import INPUT_RATE_HZ, HeardToken, TranscriptDelta
from sglang_live.gateway.http.timed_text import words_of
from test.unit.gateway.fakes import MODEL, FakeOrchestrator, app_of, done

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
DETAILS = {"recognises": True, "recogniser_gives": ("details", "translations")}


def twice() -> bytes:
    """A sound from 1.0 to 2.0 s and from 3.5 to 4.5 s."""
    sound = 0.3 * np.sin(2 * np.pi * 440 * np.arange(INPUT_RATE_HZ) / INPUT_RATE_HZ)
    pauses = [np.zeros(round(s * INPUT_RATE_HZ)) for s in (1.0, 1.5, 2.0)]
    file = io.BytesIO()
    whole = np.concatenate([pauses[0], sound, pauses[1], sound, pauses[2]])
    sf.write(file, whole, INPUT_RATE_HZ, format="WAV")
    return file.getvalue()


def tokens(*pieces: str) -> tuple[HeardToken, ...]:
    return tuple(
        HeardToken(piece.encode(), -0.5, 0.3 + 0.1 * n, 0.4 + 0.1 * n)
        for n, piece in enumerate(pieces)
    )


def says(*texts: str, heard=()) -> FakeOrchestrator:
    return FakeOrchestrator(
        [[TranscriptDelta(text), done(text, heard=tuple(heard))] for text in texts]
    )


async def ask(orchestrator, path=TRANSCRIPTIONS, config=None, **fields) -> httpx.Response:
    transport = httpx.ASGITransport(app_of(orchestrator, **(config or {})))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        files = {"file": ("said.wav", twice())}
        return await http.post(path, data={"model": MODEL, **fields}, files=files)


async def test_segments_are_the_stretches_of_speech():
    orchestrator = says("Hello there.", "It rains.")
    body = (await ask(orchestrator, response_format="verbose_json", language="en")).json()
    assert (body["text"], body["task"], body["language"]) == (
        "Hello there. It rains.",
        "transcribe",
        "en",
    )
    assert body["duration"] == 6.5
    assert "words" not in body
    found = [(s["id"], s["text"], s["start"], s["end"]) for s in body["segments"]]
    assert found == [
        (0, "Hello there.", pytest.approx(1.0, abs=0.4), pytest.approx(2.0, abs=0.4)),
        (1, "It rains.", pytest.approx(3.5, abs=0.4), pytest.approx(4.5, abs=0.4)),
    ]
    assert body["segments"][0]["avg_logprob"] is None
    assert len(orchestrator.turns) == 2


async def test_words_have_their_times_in_the_recording():
    heard = tokens(" He", "llo", " there", ".")
    orchestrator = says("Hello there.", "Hello there.", heard=heard)
    fields = {"timestamp_granularities[]": ["word", "segment"]}
    response = await ask(orchestrator, config=DETAILS, response_format="verbose_json", **fields)
    body = response.json()
    assert [word["word"] for word in body["words"]] == ["Hello", "there."] * 2
    begin_s = [segment["start"] for segment in body["segments"]]
    assert body["words"][0]["start"] == pytest.approx(begin_s[0] + 0.3)
    assert body["words"][3]["end"] == pytest.approx(begin_s[1] + 0.7)
    assert body["segments"][0]["avg_logprob"] == -0.5
    assert [turn.in_detail for turn in orchestrator.turns] == [True, True]
    alone = await ask(
        says("Hi.", "Ho.", heard=heard),
        config=DETAILS,
        response_format="verbose_json",
        **{"timestamp_granularities[]": "word"},
    )
    assert "segments" not in alone.json() and len(alone.json()["words"]) == 4


async def test_subtitles():
    srt = (await ask(says("Hello.", "It rains."), response_format="srt")).text.splitlines()
    assert srt[0] == "1" and srt[2] == "Hello." and srt[4] == "2" and srt[6] == "It rains."
    begin, end = srt[1].split(" --> ")
    assert begin.startswith("00:00:00,") or begin.startswith("00:00:01,")
    assert end.startswith("00:00:02,")
    vtt = (await ask(says("Hello.", "It rains."), response_format="vtt")).text
    assert vtt.startswith("WEBVTT\n\n00:00:0") and "\n\n00:00:03." in vtt


async def test_subtitles_of_silence_are_empty():
    silence = FakeOrchestrator()
    transport = httpx.ASGITransport(app_of(silence))
    file = io.BytesIO()
    sf.write(file, np.zeros(INPUT_RATE_HZ), INPUT_RATE_HZ, format="WAV")
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for name, wanted in (("srt", ""), ("vtt", "WEBVTT\n")):
            response = await http.post(
                TRANSCRIPTIONS,
                data={"response_format": name},
                files={"file": ("quiet.wav", file.getvalue())},
            )
            assert response.text == wanted


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_logprobs_of_every_token(stream):
    orchestrator = says("Hello.", heard=tokens(" Hel", "lo", "."))
    response = await ask(orchestrator, config=DETAILS, stream=stream, **{"include[]": "logprobs"})
    body = (
        response.json()
        if stream == "false"
        else httpx.Response(200, text=response.text.split("data: ")[-1]).json()
    )
    assert [one["token"] for one in body["logprobs"]] == [" Hel", "lo", "."]
    assert body["logprobs"][0] == {"token": " Hel", "logprob": -0.5, "bytes": [32, 72, 101, 108]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include[]": "logprobs"}, "include"),
        ({"include[]": "words"}, "include[0]"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
        ),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"response_format": "srt", "stream": "true"}, "stream"),
        ({"response_format": "diarized_json"}, "response_format"),
    ],
)
async def test_what_the_model_or_the_format_lacks_is_refused_by_name(fields, param):
    orchestrator = says("Hello.")
    response = await ask(orchestrator, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert orchestrator.sessions == []


async def test_a_translation_is_asked_of_the_recogniser():
    orchestrator = says("It rains.")
    response = await ask(orchestrator, TRANSLATIONS, DETAILS, response_format="json")
    assert response.json()["text"] == "It rains."
    assert [turn.translates for turn in orchestrator.turns] == [True]
    body = (
        await ask(says("A.", "B."), TRANSLATIONS, DETAILS, response_format="verbose_json")
    ).json()
    assert (body["task"], body["language"]) == ("translate", "en")


async def test_a_model_that_does_not_translate_says_so():
    orchestrator = says("x")
    response = await ask(orchestrator, TRANSLATIONS, {"recognises": True})
    assert response.status_code == 400
    assert "does not translate" in response.json()["error"]["message"]
    assert orchestrator.sessions == []
    response = await ask(orchestrator, TRANSLATIONS, DETAILS, language="de")
    assert response.json()["error"]["param"] == "language"


async def test_openais_client_reads_them():
    orchestrator = says("A b.", "C d.", heard=tokens(" A", " b."))
    transport = httpx.ASGITransport(app_of(orchestrator, **DETAILS))
    http = httpx.AsyncClient(transport=transport)
    client = AsyncOpenAI(api_key="k", base_url="http://gateway/v1", http_client=http)
    read = await client.audio.transcriptions.create(
        file=("said.wav", twice()),
        model=MODEL,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert [word.word for word in read.words] == ["A", "b."] * 2
    assert [segment.text for segment in read.segments] == ["A b.", "C d."]


def test_words_of_scripts_without_spaces_and_of_split_characters():
    cloud = "雲".encode()
    heard = [
        HeardToken(piece, -0.1, n, n + 1)
        for n, piece in enumerate((b"\xe9", "雨".encode()[1:], cloud, b"a", b" b"))
    ]
    assert [word for word, *_ in words_of(heard)] == ["雨", "雲a", "b"]
    assert math.isclose(words_of(heard)[0][2], 2)
