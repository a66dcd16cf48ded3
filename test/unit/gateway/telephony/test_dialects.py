"""What phone services' frames mean."""

import base64
import json
import random

import pytest

from sglang_live.errors import BadInputError
from sglang_live.gateway.audio.codec import PCMA, PCMU
from sglang_live.gateway.telephony.dialects import (
    TELNYX,
    TWILIO,
    Asterisk,
    Begun,
    HungUp,
    JsonStream,
    Key,
    PlainSocket,
    Played,
    Sound,
)
from test.phones import mutated_frame


def telnyx() -> JsonStream:
    dialect = JsonStream(TELNYX)
    form = {"encoding": "PCMA", "sample_rate": 8000}
    start = {"call_control_id": "v2:x", "media_format": form}
    frame = json.dumps({"event": "start", "stream_id": "s", "start": start})
    assert list(dialect.read(frame)) == [Begun("v2:x", PCMA)]
    return dialect


def media(raw: bytes, **fields) -> str:
    payload = base64.b64encode(raw).decode()
    return json.dumps({"event": "media", "media": {"payload": payload, **fields}})


def test_media_is_put_in_order_and_what_is_lost_is_silence():
    dialect, heard = telnyx(), []
    for chunk in (2, 4, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 6, 16):
        facts = dialect.read(media(bytes([chunk]), chunk=str(chunk)))
        heard += [fact.raw[0] for fact in facts]
    silence = PCMA.silence[0]
    assert heard == [2, 3, 4, 5, silence, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


def test_what_the_user_hears_is_not_what_he_says():
    facts = list(telnyx().read(media(b"x", track="outbound", chunk="1")))
    assert facts == []


def test_frames_for_twilio_name_the_stream_and_for_telnyx_do_not():
    twilio = JsonStream(TWILIO)
    form = {"encoding": "audio/x-mulaw"}
    start = {"callSid": "CA1", "streamSid": "MZ1", "mediaFormat": form}
    assert list(twilio.read(json.dumps({"event": "start", "start": start}))) == [Begun("CA1", PCMU)]
    assert json.loads(twilio.clear()) == {"event": "clear", "streamSid": "MZ1"}
    assert json.loads(telnyx().clear()) == {"event": "clear"}
    assert list(twilio.read('{"event": "stop", "stop": {}}')) == [HungUp()]
    assert list(twilio.read('{"event": "new thing"}')) == []


def test_asterisk_is_answered_in_its_own_form():
    words, objects = Asterisk(), Asterisk()
    assert list(words.read(b"early")) == []
    begun, early = words.read("MEDIA_START connection_id:c channel:W/x format:ulaw ptime:20")
    assert (begun, early) == (Begun("c", PCMU), Sound(b"early"))
    start = {"event": "MEDIA_START", "connection_id": "c", "format": "alaw"}
    assert list(objects.read(json.dumps(start))) == [Begun("c", PCMA)]
    assert (words.mark("7"), words.clear(), words.hang_up()) == (
        "MARK_MEDIA 7",
        "FLUSH_MEDIA",
        "HANGUP",
    )
    assert json.loads(objects.mark("7")) == {"command": "MARK_MEDIA", "correlation_id": "7"}
    assert list(words.read("DTMF_END channel_id:p digit:#")) == [Key("#")]
    assert list(words.read("MEDIA_MARK_PROCESSED 7")) == [Played("7")]
    assert list(words.read("MEDIA_XOFF")) == []
    assert words.speech(b"\0" * 100) == b"\0" * 100 + b"\xff" * 60


@pytest.mark.parametrize("make", [telnyx, Asterisk, lambda: PlainSocket("p", PCMU)])
def test_mutated_frames_are_read_or_refused(make):
    rng, dialect = random.Random(3), make()
    n_refused = 0
    for _ in range(2000):
        try:
            list(dialect.read(mutated_frame(rng)))
        except BadInputError:
            n_refused += 1
    assert n_refused
