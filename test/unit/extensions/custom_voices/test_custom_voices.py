"""Voices of clients over HTTP: made, listed, spoken with and deleted, each of its key alone."""

import asyncio
import io
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import soundfile as sf

from sglang_live.arguments import parse
from sglang_live.core import AudioDelta
from sglang_live.errors import BadInputError, StageUnavailableError
from sglang_live.extensions.custom_voices.extension import CustomVoices, NoCustomVoices
from sglang_live.extensions.custom_voices.routes import VoiceRoutes
from sglang_live.extensions.custom_voices.store import Voice, VoicesFullError, VoiceStore
from sglang_live.gateway.model import CUSTOM_VOICE
from sglang_live.gateway.parts import GatewayParts
from sglang_live.interaction.silero import SileroModel
from sglang_live.models.family import ModelFacts
from sglang_live.models.voice_files import decode_recording
from test.unit.gateway.fakes import (
    FakeOrchestrator,
    app_of,
    connected,
    done,
    services,
    spoken,
    tone,
)

SPEECH = Path(__file__).parents[3] / "data" / "audio" / "sp_jfk.flac"
RATE_HZ = 24_000
MODEL = "sglang_live.models.qwen3_tts.family:tts"
ANN, BEN, EVE = "key-ann", "key-ben", "key-eve"
KEYS = {"api_keys": (ANN, BEN, EVE)}
FIELDS = {"name": "Ann at home", "consent": "I am Ann and agree that my voice is used here."}


class Maker(FakeOrchestrator):
    """Makes of a recording a voice that begins with its length. may_make: None: at once."""

    may_make: asyncio.Event | None = None
    fails_with: Exception | None = None

    async def make_voice(self, samples: np.ndarray) -> bytes:
        if self.may_make is not None:
            await self.may_make.wait()
        if self.fails_with is not None:
            raise self.fails_with
        return np.array([len(samples), samples.std()], "<f4").tobytes()


def recording(seconds: float = 3.0, rate_hz: int = 16_000, level: float = 0.3) -> bytes:
    """A loud tone, which the fakes' detector takes for speech."""
    at = np.arange(int(seconds * rate_hz)) / rate_hz
    file = io.BytesIO()
    sf.write(file, level * np.sin(2 * np.pi * 200 * at), rate_hz, format="WAV")
    return file.getvalue()


class World:
    """A gateway whose clients Ann and Ben may make voices, and Eve may not."""

    def __init__(
        self,
        folder: Path,
        most: int = 3,
        scripts=(),
        model: str = MODEL,
        speech_model=None,
        min_s: float = 1.0,
    ):
        self.min_s = min_s
        self.orchestrator = Maker([*scripts])
        self.store = VoiceStore(folder, model, most)
        self.app = app_of(
            self.orchestrator, additions=[self._routes], speech_model=speech_model, **KEYS
        )

    def _routes(self, parts: GatewayParts) -> VoiceRoutes:
        self.routes = VoiceRoutes(parts, self.store, (ANN, BEN), RATE_HZ, self.min_s)
        return self.routes

    def client(self, key: str = ANN) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://gateway",
            headers={"authorization": f"Bearer {key}"},
        )

    async def make(
        self, key: str = ANN, data: bytes | None = None, **fields: str
    ) -> httpx.Response:
        form = {name: value for name, value in (FIELDS | fields).items() if value is not None}
        files = {"audio_sample": ("ann.wav", recording() if data is None else data)}
        return await self.client(key).post("/v1/audio/voices", data=form, files=files)

    async def made(self, key: str = ANN, **fields: str) -> str:
        response = await self.make(key, **fields)
        assert response.status_code == 200, response.text
        return response.json()["id"]

    async def listed(self, key: str = ANN) -> dict[str, str]:
        voices = (await self.client(key).get("/v1/audio/voices")).json()["voices"]
        return {voice["id"]: voice["name"] for voice in voices}

    async def speak(self, voice: object, key: str = ANN) -> httpx.Response:
        body = {"input": "Hello.", "voice": voice, "response_format": "pcm"}
        return await self.client(key).post("/v1/audio/speech", json=body)

    async def delete(self, voice: str, key: str = ANN) -> httpx.Response:
        return await self.client(key).delete(f"/v1/audio/voices/{voice}")


def error(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    return response.json()["error"]


SAID = [AudioDelta(tone(80)), done("Hello.")]


async def test_a_voice_is_made_listed_spoken_with_and_deleted(tmp_path):
    world = World(tmp_path, scripts=[SAID, SAID])
    response = await world.make()
    made = response.json()
    assert made["id"].startswith(CUSTOM_VOICE) and made["object"] == "audio.voice"
    assert {field: made[field] for field in FIELDS} == FIELDS and made["created_at"] > 1.7e9
    assert (await world.listed()) == {"ada": "ada", "bob": "bob", made["id"]: "Ann at home"}
    legacy = await world.client().get("/v1/audio/voices?legacy=true")
    assert legacy.json() == {"voices": ["ada", "bob", made["id"]]}
    one = await world.client().get(f"/v1/audio/voices/{made['id']}")
    assert one.json() == made
    for voice in (made["id"], {"id": made["id"]}):
        assert (await world.speak(voice)).content == tone(80)
        [turn] = world.orchestrator.turns
        assert turn.voice == made["id"]
        # Three seconds of it, at the talker's rate.
        n_samples, deviation = np.frombuffer(turn.speaker, "<f4")
        assert n_samples == 3 * RATE_HZ and deviation == pytest.approx(0.3 / 2**0.5, abs=0.01)
    gone = await world.delete(made["id"])
    assert gone.json() == {"id": made["id"], "object": "audio.voice.deleted", "deleted": True}
    assert made["id"] not in await world.listed()
    refused = error(await world.speak(made["id"]), 400)
    assert f"no voice '{made['id']}'" in refused["message"] and refused["param"] == "voice"
    assert error(await world.delete(made["id"]), 404)["code"] == "voice_not_found"


async def test_a_voice_of_the_model_needs_no_speaker(tmp_path):
    world = World(tmp_path, scripts=[SAID])
    await world.made()
    await world.speak("bob")
    [turn] = world.orchestrator.turns
    assert (turn.voice, turn.speaker) == ("bob", b"")


async def test_another_key_neither_lists_nor_uses_nor_deletes_it(tmp_path):
    world = World(tmp_path, scripts=[SAID])
    voice = await world.made(ANN)
    for key in (BEN, EVE):
        assert list(await world.listed(key)) == ["ada", "bob"]
        refused = error(await world.speak(voice, key), 400)
        assert f"no voice '{voice}'" in refused["message"]
    assert error(await world.delete(voice, BEN), 404)["code"] == "voice_not_found"
    found = await world.client(BEN).get(f"/v1/audio/voices/{voice}")
    assert error(found, 404)["code"] == "voice_not_found"
    assert (await world.speak(voice, ANN)).status_code == 200


async def test_a_key_that_the_operator_has_not_named_makes_none(tmp_path):
    world = World(tmp_path)
    assert error(await world.make(EVE), 403)["code"] == "custom_voices_not_allowed"
    assert error(await world.delete("voice_x", EVE), 403)["code"] == "custom_voices_not_allowed"
    assert (await world.client("none").post("/v1/audio/voices")).status_code == 401
    assert not list(tmp_path.glob("*.json"))


UNFIT = {
    "nothing": lambda: b"",
    "text": lambda: b"no sound at all" * 100,
    "short": lambda: recording(0.4),
    "long": lambda: recording(31.0),
    "ten minutes": lambda: recording(600.0),
    "telephone": lambda: recording(3.0, 8_000),
    "silence": lambda: recording(3.0, level=0.0),
}


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        ("nothing", 400, "no audio file"),
        ("text", 400, "no audio file"),
        ("short", 400, "lasts 0.40 s, a voice needs at least 1 s"),
        ("long", 400, "longer than 30 s"),
        ("ten minutes", 413, ""),
        ("telephone", 400, "8000 Hz"),
        ("silence", 400, "There is no speech in it"),
    ],
)
async def test_a_recording_that_is_no_voice_is_refused_by_name(tmp_path, kind, status, message):
    world = World(tmp_path)
    refused = error(await world.make(data=UNFIT[kind]()), status)
    assert message in refused["message"]
    assert status == 413 or refused["param"] == "audio_sample"
    assert list(await world.listed()) == ["ada", "bob"] and not list(tmp_path.glob("*.json"))


async def test_of_noise_no_voice_is_made_and_of_speech_one_is(tmp_path):
    world = World(tmp_path, speech_model=SileroModel())
    noise = io.BytesIO()
    sf.write(noise, np.random.default_rng(1).normal(0, 0.05, 48_000), 16_000, format="WAV")
    refused = error(await world.make(data=noise.getvalue()), 400)
    assert "There is no speech in it" in refused["message"]
    assert (await world.make(data=SPEECH.read_bytes())).status_code == 200


async def test_one_second_suffices_unless_the_model_needs_more(tmp_path):
    world = World(tmp_path)
    assert (await world.make(data=recording(1.0))).status_code == 200
    world.store.close()
    other = World(tmp_path, min_s=5.0)
    refused = error(await other.make(data=recording(4.9)), 400)
    assert "lasts 4.90 s, a voice needs at least 5 s" in refused["message"]
    assert (await other.make(data=recording(5.0))).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"name": None}, "name", "needs 'name'"),
        ({"consent": None}, "consent", "the speaker's consent"),
        ({"consent": "  "}, "consent", "the speaker's consent"),
        ({"name": "n" * 257}, "name", "more than 256"),
        ({"consent": "n" * 1025}, "consent", "more than 1024"),
        ({"name": None, "model": "x"}, "model", "Unknown field 'model'"),
    ],
)
async def test_a_form_that_lacks_something_is_refused(tmp_path, fields, param, message):
    refused = error(await World(tmp_path).make(**fields), 400)
    assert message in refused["message"] and refused["param"] == param


async def test_a_form_without_a_recording_is_refused(tmp_path):
    client = World(tmp_path).client()
    refused = error(await client.post("/v1/audio/voices", data=FIELDS), 400)
    assert refused["param"] == "audio_sample"
    without = await client.post("/v1/audio/voices", data=FIELDS, files={"x": ("x", b"")})
    assert error(without, 400)["param"] == "x"


async def test_the_number_of_a_key_s_voices_is_bounded(tmp_path):
    world = World(tmp_path, most=2)
    voice = await world.made()
    await world.made()
    refused = error(await world.make(), 429)
    assert refused["code"] == "too_many_voices" and "has 2 voices" in refused["message"]
    assert (await world.make(BEN)).status_code == 200, "it is the limit of each key"
    await world.delete(voice)
    assert (await world.make()).status_code == 200


async def test_a_key_makes_one_voice_at_a_time(tmp_path):
    world = World(tmp_path)
    world.orchestrator.may_make = asyncio.Event()
    first = asyncio.create_task(world.make())
    while not world.routes._making:
        await asyncio.sleep(0.01)
    assert error(await world.make(), 429)["code"] == "too_many_voices"
    world.orchestrator.may_make.set()
    assert (await first).status_code == 200


async def test_a_voice_that_could_not_be_made_leaves_nothing(tmp_path):
    world = World(tmp_path)
    world.orchestrator.fails_with = StageUnavailableError("talker/0 is down", retry_after_s=10)
    assert error(await world.make(), 503)["code"] == "stage_unavailable"
    world.orchestrator.fails_with = None
    assert not list(tmp_path.glob("*.json"))
    await world.made()


# --- deletion while it is in use ---


async def test_a_speech_that_has_begun_ends_in_its_voice(tmp_path):
    """It has two pieces: the second begins behind the deletion."""
    world = World(tmp_path, scripts=[SAID, SAID])
    voice = await world.made()
    text = "One sentence has many words. " * 15
    body = {"input": text, "voice": voice, "response_format": "pcm"}
    gate = asyncio.Event()
    world.orchestrator.scripts[0] = [AudioDelta(tone(80)), gate, done("Hello.")]
    speech = asyncio.create_task(world.client().post("/v1/audio/speech", json=body))
    while not (world.orchestrator.sessions and world.orchestrator.turns):
        await asyncio.sleep(0.01)
    assert (await world.delete(voice)).status_code == 200
    gate.set()
    assert (await speech).status_code == 200
    first, second = world.orchestrator.turns
    assert first.speaker == second.speaker != b""
    assert error(await world.speak(voice), 400)["code"] == "invalid_value"


async def test_a_call_speaks_with_it_until_it_is_deleted(tmp_path):
    orchestrator = Maker([spoken("Hello."), spoken("Hello.")])
    parts = services(orchestrator, **KEYS)
    store = parts.custom_voices = VoiceStore(tmp_path, MODEL, 3)
    store.add(stored(store, ANN))
    other = stored(store, BEN)
    store.add(other)
    async with connected(orchestrator, parts, {"owner": ANN}) as client:
        client.send("session.update", session=spoken_by(other.id))
        refused = await client.expect("error")
        assert f"no voice '{other.id}'" in refused["error"]["message"]
        [(mine, _)] = store.names(ANN)
        client.send("session.update", session=spoken_by({"id": mine}))
        updated = await client.expect("session.updated")
        assert updated["session"]["audio"]["output"]["voice"] == mine
        client.send("response.create")
        end = (await client.until("response.done"))[-1]["response"]
        assert end["status"] == "completed"
        [turn] = orchestrator.turns
        assert (turn.voice, turn.speaker) == (mine, b"ann")
        store.delete(store.get(ANN, mine))
        client.send("response.create")
        end = (await client.until("response.done"))[-1]["response"]
        assert end["status"] == "failed"
        assert f"no voice '{mine}'" in end["status_details"]["error"]["message"]
        assert len(orchestrator.turns) == 1, "no stage was asked"


def spoken_by(voice: object) -> dict:
    return {"type": "realtime", "audio": {"output": {"voice": voice}}}


# --- the folder ---


def stored(store: VoiceStore, owner: str, **changes) -> Voice:
    n = len(list(store._voices))
    voice = Voice(
        id=f"{CUSTOM_VOICE}{n:04}",
        owner=store.digest(owner),
        name="Ann",
        consent="yes",
        created_s=1_800_000_000 + n,
        duration_s=3.0,
        model=store.model,
        speaker=b"ann",
    )
    return msgspec.structs.replace(voice, **changes)


async def test_voices_survive_a_restart_and_are_no_recordings(tmp_path):
    world = World(tmp_path)
    voice = await world.made()
    speaker = world.store.speaker(ANN, voice)
    world.store.close()
    again = World(tmp_path)
    assert again.store.speaker(ANN, voice) == speaker != b""
    assert (await again.listed())[voice] == "Ann at home"
    [file] = tmp_path.glob("*.json")
    text = file.read_text()
    assert len(text) < 1000 and ANN not in text and oct(file.stat().st_mode)[-3:] == "600"
    await again.delete(voice)
    again.store.close()
    assert list(await World(tmp_path).listed()) == ["ada", "bob"]


async def test_a_voice_of_another_model_is_kept_and_cannot_be_used(tmp_path):
    world = World(tmp_path)
    voice = await world.made()
    world.store.close()
    other = World(tmp_path, model="another")
    assert list(await other.listed()) == ["ada", "bob"]
    assert f"no voice '{voice}'" in error(await other.speak(voice), 400)["message"]
    assert (await other.client().get(f"/v1/audio/voices/{voice}")).status_code == 200
    assert (await other.delete(voice)).status_code == 200


def test_a_folder_belongs_to_one_server(tmp_path):
    first = VoiceStore(tmp_path, MODEL, 3)
    with pytest.raises(BadInputError, match="another server uses"):
        VoiceStore(tmp_path, MODEL, 3)
    first.close()
    VoiceStore(tmp_path, MODEL, 3).close()


def test_a_folder_that_cannot_be_used_or_has_a_broken_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"--custom-voices: cannot use .*file"):
        VoiceStore(tmp_path / "file", MODEL, 3)
    folder = tmp_path / "voices"
    VoiceStore(folder, MODEL, 3).close()
    (folder / "voice_1.json").write_text('{"id": 1}')
    with pytest.raises(BadInputError, match=r"--custom-voices: .*voice_1.json is no voice"):
        VoiceStore(folder, MODEL, 3)
    (folder / "voice_1.json").unlink()
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(BadInputError, match="is no secret of 32 bytes"):
        VoiceStore(folder, MODEL, 3)


def test_without_room_nothing_is_added(tmp_path, monkeypatch):
    store = VoiceStore(tmp_path, MODEL, 3)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(VoicesFullError):
        store.add(stored(store, ANN))
    assert store.names(ANN) == () and sorted(f.name for f in tmp_path.iterdir()) == [
        "lock",
        "secret",
    ]


# --- flags ---


def added(*argv: str) -> CustomVoices | NoCustomVoices:
    additions = parse(["--model-path", "demo", *argv]).additions
    [found] = [one for one in additions if isinstance(one, CustomVoices | NoCustomVoices)]
    return found


def facts(**more) -> ModelFacts:
    path = Path("/models/tts")
    return ModelFacts(path=path, weights=path, family="f", voices=("a",), **more)


async def test_without_the_flag_routes_name_it():
    off = added()
    assert isinstance(off, NoCustomVoices)
    app = app_of(FakeOrchestrator(), additions=[off.gateway], api_keys=(ANN,))
    headers = {"authorization": f"Bearer {ANN}"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g", headers=headers) as http:
        refused = error(await http.post("/v1/audio/voices"), 404)
        assert refused["code"] == "custom_voices_off" and "--custom-voices" in refused["message"]
        assert (await http.get("/v1/audio/voices")).status_code == 200


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--custom-voices", "/v"), "belong together"),
        (("--custom-voice-key", "k", "--api-key", "k"), "belong together"),
        (("--custom-voices", "/v", "--custom-voice-key", "k"), "has to be an --api-key"),
        (("--custom-voices-per-key", "0"), "custom-voices-per-key"),
    ],
)
def test_flags_that_do_not_fit_are_refused(argv, message):
    with pytest.raises(BadInputError, match=message):
        added(*argv)


def test_a_model_that_makes_no_voices_is_refused_by_name():
    on = added("--custom-voices", "/v", "--custom-voice-key", "k", "--api-key", "k")
    with pytest.raises(BadInputError, match="--custom-voices: tts makes no voices while it serves"):
        on.check(facts(clones_voices=True))
    on.check(facts(clones_voices=True, voice_rate_hz=RATE_HZ))


def test_a_recording_is_decoded_at_the_rate_of_the_talker():
    assert len(decode_recording(recording(2.0, 48_000), RATE_HZ)) == 2 * RATE_HZ
