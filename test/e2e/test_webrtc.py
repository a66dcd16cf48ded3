"""A call over WebRTC: a question is heard and answered, also when packets are lost."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import soundfile as sf
import soxr

import sglang_live
from sglang_live.webrtc.messages import SENT_RATE_HZ
from test.calls import calling
from test.e2e.browser import microphone_of, visit
from test.e2e.test_examples import EXAMPLES

pytestmark = pytest.mark.e2e


QUESTION = Path(sglang_live.__file__).parent / "assets" / "question.flac"


def question() -> np.ndarray:
    pcm, rate_hz = sf.read(QUESTION, dtype="float32")
    return (soxr.resample(pcm, rate_hz, SENT_RATE_HZ) * 32_767).astype(np.int16)


# Chromium, below, loses no packet.
@pytest.mark.parametrize("loss", [pytest.param(0.0, marks=pytest.mark.nightly), 0.02])
async def test_a_question_is_answered_aloud(talking, loss):
    async with (
        httpx.AsyncClient(base_url=talking.http, timeout=30) as http,
        calling(http, loss) as browser,
    ):
        await asyncio.sleep(0.5)
        browser.microphone.say(question())
        said = await browser.find("response.output_audio_transcript.done", 60)
        assert said["transcript"] == "Paris is the capital of France."
        await browser.until("output_audio_buffer.stopped", 30)
        await asyncio.sleep(0.3)
        sound = browser.sound()
        assert 1.5 < len(sound) / SENT_RATE_HZ < 6 and sound.std() > 500


TALK = """
async () => {
  const peer = new RTCPeerConnection(), events = [], streams = [];
  peer.ontrack = ({streams: [stream]}) => {
    streams.push(stream);
    const sound = new Audio();
    sound.srcObject = stream;
    sound.play();
  };
  const microphone = await navigator.mediaDevices.getUserMedia({audio: true});
  peer.addTrack(microphone.getTracks()[0]);
  const channel = peer.createDataChannel("oai-events");
  channel.onmessage = ({data}) => events.push(JSON.parse(data));
  await peer.setLocalDescription(await peer.createOffer());
  const answer = await fetch("/v1/realtime/calls", {
    method: "POST",
    body: peer.localDescription.sdp,
    headers: {"content-type": "application/sdp"},
  });
  await peer.setRemoteDescription({type: "answer", sdp: await answer.text()});
  for (let n = 0; n < 600; n++) {
    if (events.some(({type}) => type === "output_audio_buffer.stopped")) break;
    await new Promise((done) => setTimeout(done, 100));
  }
  const reports = [...(await peer.getStats()).values()];
  peer.close();
  return {
    status: answer.status,
    streams: streams.length,
    said: events.find(({type}) => type === "response.output_audio_transcript.done")?.transcript,
    heard: reports.find(({type}) => type === "inbound-rtp"),
  };
}
"""


async def test_a_page_in_chromium_talks(talking, tmp_path):
    sound = microphone_of(tmp_path / "microphone.wav", question(), before_s=10.0)
    async with visit(talking.http, sound, calls=True) as visited:
        found = await visited.page.evaluate(TALK)
        assert (found["status"], found["streams"]) == (201, 1)
        assert found["said"] == "Paris is the capital of France."
        assert found["heard"]["packetsReceived"] > 75 and found["heard"]["packetsLost"] == 0
        assert found["heard"]["totalAudioEnergy"] > 0.01


async def test_openais_agents_sdk_in_chromium_talks(talking, tmp_path):
    sound = microphone_of(tmp_path / "microphone.wav", question(), before_s=10.0)
    async with visit(talking.http, sound, calls=True) as visited:
        page, origin = visited.page, f"{talking.http}/examples"

        async def serve(route) -> None:
            await route.fulfill(path=EXAMPLES / urlsplit(route.request.url).path[10:])

        await page.route(f"{origin}/**", serve)
        await page.goto(f"{origin}/openai_agents_browser.html?url={talking.http}")
        await page.click("#talk")
        said = "#said li:text-is('assistant: Paris is the capital of France.')"
        await page.wait_for_selector(said, timeout=60_000)
        assert visited.complaints == []
