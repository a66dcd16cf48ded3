"""Turn tracker: turns the server's events into one TurnRecord.

In: user_finished, on_event, fail. Out: is_over, record.
Owner: one TurnTracker per turn of a RealtimeClient. Does no I/O.
"""

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

from sglang_live.client import clip
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.turn_record import MS_PER_S, TurnRecord
from sglang_live.clock import Clock

Event = dict[str, Any]

# After a reply that came too early or was interrupted, the server may still answer what was
# said last. If it stays quiet this long, that reply was the answer.
SETTLE_S = 2.0

# Answers to events of ours that came too late to matter; the turn goes on.
HARMLESS_ERRORS = frozenset(
    {"response_cancel_not_active", "conversation_already_has_active_response"}
)


@dataclass(slots=True)
class Reply:
    """One response of the server, as far as it has arrived."""

    response_id: str
    created_s: float
    playback: PlaybackClock
    first_audio_s: float | None = None
    last_audio_s: float | None = None
    packets: int = 0
    pcm: bytearray = field(default_factory=bytearray)
    transcript: str = ""
    text_only: bool = False
    done_s: float | None = None
    status: str | None = None
    error: str | None = None

    def add_audio(self, packet: bytes, now_s: float) -> None:
        if self.first_audio_s is None:
            self.first_audio_s = now_s
        self.last_audio_s = now_s
        self.packets += 1
        self.pcm += packet
        self.playback.packet_received(clip.duration_s(packet))


class TurnTracker:
    def __init__(self, clock: Clock, kind: str, user_audio_s: float = 0.0):
        self._clock = clock
        self._kind = kind
        self._user_audio_s = user_audio_s
        self._finished_s: float | None = None
        self._speech_stopped_s: float | None = None
        self._server_hears_speech = False
        self._reply_due = False
        self._early_replies = 0
        self._user_transcript: str | None = None
        self._failure: tuple[str, str] | None = None
        self.reply: Reply | None = None

    def user_finished(self) -> None:
        """The last of the user's speech has been sent."""
        self._finished_s = self._clock.now_s()

    def fail(self, status: str, message: str) -> None:
        """Nothing more will come. The first reason given is the one that counts."""
        self._failure = self._failure or (status, message)

    def is_over(self) -> bool:
        if self._failure:
            return True
        reply, finished_s = self.reply, self._finished_s
        if reply is None or reply.done_s is None or finished_s is None:
            return False
        if reply.created_s >= finished_s and reply.status != "cancelled":
            return True
        quiet_s = self._clock.now_s() - max(reply.done_s, finished_s)
        return quiet_s >= SETTLE_S and not self._server_hears_speech and not self._reply_due

    def on_event(self, event: Event) -> None:
        handler = self._HANDLERS.get(event["type"])
        if handler:
            handler(self, event)

    def record(self) -> TurnRecord:
        reply = self.reply
        status, error = self._status()
        if reply is None:
            return TurnRecord(
                kind=self._kind,
                status=status,
                error=error,
                user_audio_s=self._user_audio_s,
                end_of_turn_ms=self._since_speech_ms(self._speech_stopped_s),
                user_transcript=self._user_transcript,
            )
        return TurnRecord(
            kind=self._kind,
            status=status,
            error=error,
            user_audio_s=self._user_audio_s,
            ttfp_ms=self._since_speech_ms(reply.first_audio_s),
            end_of_turn_ms=self._since_speech_ms(self._speech_stopped_s),
            audio_s=clip.duration_s(reply.pcm),
            audio_packets=reply.packets,
            generation_s=None if not reply.packets else reply.last_audio_s - reply.created_s,
            gaps_ms=tuple(gap_s * MS_PER_S for gap_s in reply.playback.gaps_s),
            gaps_over_100ms=reply.playback.audible_gaps,
            transcript=reply.transcript,
            user_transcript=self._user_transcript,
            early_replies=self._early_replies,
            response_id=reply.response_id,
            reply_pcm=bytes(reply.pcm),
        )

    def _status(self) -> tuple[str, str | None]:
        if self._failure:
            return self._failure
        reply = self.reply
        assert reply is not None and reply.status is not None, "asked before the turn was over"
        promised = reply.transcript if reply.text_only else reply.pcm
        if reply.status == "completed" and not promised:
            return "empty", "the response completed without any audio"
        return reply.status, reply.error

    def _since_speech_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._finished_s is None:
            return None
        return (at_s - self._finished_s) * MS_PER_S

    def _on_speech_started(self, _event: Event) -> None:
        self._server_hears_speech = True

    def _on_speech_stopped(self, _event: Event) -> None:
        self._server_hears_speech = False
        self._reply_due = True
        self._speech_stopped_s = self._clock.now_s()

    def _on_response_created(self, event: Event) -> None:
        # A later response replaces an earlier one: the server took a pause for the end of
        # the turn, or was interrupted, and what it says now is the answer.
        if self._finished_s is None:
            self._early_replies += 1
        self._reply_due = False
        self.reply = Reply(
            response_id=event["response"]["id"],
            created_s=self._clock.now_s(),
            playback=PlaybackClock(self._clock),
        )

    def _on_audio(self, event: Event) -> None:
        reply = self._reply_of(event["response_id"])
        if reply is None:
            return
        try:
            packet = base64.b64decode(event["delta"], validate=True)
        except binascii.Error as error:
            self.fail("error", f"audio packet is not base64: {error}")
            return
        if len(packet) % clip.BYTES_PER_SAMPLE:
            self.fail("error", f"audio packet of {len(packet)} bytes cuts a sample in two")
        elif packet:
            reply.add_audio(packet, self._clock.now_s())

    def _on_transcript_delta(self, event: Event) -> None:
        reply = self._reply_of(event["response_id"])
        if reply is not None:
            reply.transcript += event["delta"]
            reply.text_only = event["type"] == "response.output_text.delta"

    def _on_response_done(self, event: Event) -> None:
        response = event["response"]
        reply = self._reply_of(response["id"])
        if reply is None:
            return
        reply.done_s = self._clock.now_s()
        reply.status = response["status"]
        if reply.status != "completed":
            details = response.get("status_details") or {}
            failure = details.get("error") or {}
            reply.error = failure.get("message") or details.get("reason") or reply.status

    def _on_user_transcript(self, event: Event) -> None:
        self._user_transcript = event["transcript"]

    def _on_error(self, event: Event) -> None:
        error = event["error"]
        if error.get("code") not in HARMLESS_ERRORS:
            self.fail("error", f"{error.get('code') or error['type']}: {error['message']}")

    def _reply_of(self, response_id: str) -> Reply | None:
        if self.reply is not None and self.reply.response_id == response_id:
            return self.reply
        return None

    _HANDLERS = {  # noqa: RUF012 (filled once, here)
        "error": _on_error,
        "input_audio_buffer.speech_started": _on_speech_started,
        "input_audio_buffer.speech_stopped": _on_speech_stopped,
        "conversation.item.input_audio_transcription.completed": _on_user_transcript,
        "response.created": _on_response_created,
        "response.output_audio.delta": _on_audio,
        "response.output_audio_transcript.delta": _on_transcript_delta,
        "response.output_text.delta": _on_transcript_delta,
        "response.done": _on_response_done,
    }
