"""Turn tracker: turns the server's events into one TurnRecord.

In: user_finished, interrupted, interruption_began, on_event, fail. Out: is_over, record.
Owner: one TurnTracker per turn of a RealtimeClient. Does no I/O.
"""

import binascii
from typing import Any

from sglang_live.client import clip
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.client.reply import Reply
from sglang_live.client.turn_record import BARGE_IN, FALSE_TRIGGER, MS_PER_S, TurnRecord
from sglang_live.clock import Clock

Event = dict[str, Any]

# After a reply that came too early or was interrupted, the server may still answer what was
# said last. If it stays quiet this long, that reply was the answer.
SETTLE_S = 2.0

# Answers to events of ours that came too late to matter; the turn goes on.
HARMLESS_ERRORS = frozenset(
    {"response_cancel_not_active", "conversation_already_has_active_response"}
)


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
        self._interruption: str | None = None
        self._interrupted_s = 0.0
        self._onset_s: float | None = None
        self.reply: Reply | None = None
        # Replies that came too early, and what the server said to a noise.
        self._others: list[Reply] = []

    @property
    def replies(self) -> list[Reply]:
        return [*self._others, *([] if self.reply is None else [self.reply])]

    @property
    def barged(self) -> bool:
        return self._interruption == BARGE_IN

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def user_finished(self) -> None:
        """The last of the user's speech has been sent."""
        self._finished_s = self._clock.now_s()

    def interrupted(self, kind: str) -> None:
        """The caller makes a sound while the answer plays: `barge_in` or `false_trigger`.

        After a barge-in only the answer's own events still count here.
        """
        self._interruption, self._interrupted_s = kind, self._clock.now_s()

    def interruption_began(self) -> None:
        """The first loud frame of that sound has been sent."""
        self._onset_s = self._clock.now_s()

    def until_cut_s(self, after_s: float) -> float | None:
        """Time left until the answer's first packet is `after_s` old; None before that packet."""
        if self._finished_s is None or self.reply is None or self.reply.first_audio_s is None:
            return None
        return self.reply.first_audio_s + after_s - self._clock.now_s()

    def fail(self, status: str, message: str) -> None:
        """Nothing more will come. The first reason given is the one that counts."""
        self._failure = self._failure or (status, message)

    def is_over(self) -> bool:
        if self._failure:
            return True
        reply, finished_s = self.reply, self._finished_s
        if reply is None or reply.done_s is None or finished_s is None:
            return False
        if self._interruption is None:
            if reply.created_s >= finished_s and reply.status != "cancelled":
                return True
            quiet_s = self._clock.now_s() - max(reply.done_s, finished_s)
        else:
            # The server may take the sound for a turn, and answer it.
            if any(other.done_s is None for other in self._others):
                return False
            quiet_s = self._clock.now_s() - max(
                self._interrupted_s, *(other.done_s for other in self._others), 0.0
            )
        return quiet_s >= SETTLE_S and not self._server_hears_speech and not self._reply_due

    def on_event(self, event: Event) -> None:
        handler = self._HANDLERS.get(event["type"])
        if handler and not (self.barged and handler not in self._OF_A_REPLY):
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
            ttft_ms=self._since_speech_ms(reply.first_text_s) if reply.text_only else None,
            heard_s=reply.heard_s,
            heard_in_all_s=sum(reply.heard_s for reply in self.replies),
            chunks_due=reply.playback.chunks_due,
            chunks_on_time=reply.playback.chunks_on_time,
            interruption=self._interruption,
            truncated_ms=self._cut_ms(),
            cut_short=reply.status == "cancelled" or reply.flushed_s is not None,
            stop_latency_ms=self._stop_latency_ms(),
            silence_ms=self._since_onset_ms(reply.flushed_s),
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
        if self.barged and reply.status is None:
            return "unstopped", "the interrupted response never ended"
        assert reply is not None and reply.status is not None, "asked before the turn was over"
        promised = reply.transcript if reply.text_only else reply.pcm
        if reply.status == "completed" and not promised:
            return "empty", "the response completed without any audio"
        return reply.status, reply.error

    def _since_speech_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._finished_s is None:
            return None
        return (at_s - self._finished_s) * MS_PER_S

    def _since_onset_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._onset_s is None:
            return None
        return (at_s - self._onset_s) * MS_PER_S

    def _cut_ms(self) -> float | None:
        if self._interruption is None:
            return None
        return (self._interrupted_s - self.reply.first_audio_s) * MS_PER_S

    def _stop_latency_ms(self) -> float | None:
        reply = self.reply
        if not self.barged or self._onset_s is None:
            return None
        if reply.done_s is not None and reply.done_s < self._onset_s:
            return None
        return max(0.0, self._since_onset_ms(reply.last_audio_s))

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
        reply = Reply(
            response_id=event["response"]["id"],
            created_s=self._clock.now_s(),
            playback=PlaybackClock(self._clock),
        )
        if self._interruption == FALSE_TRIGGER:
            self._others.append(reply)
            return
        if self.reply is not None:
            self._others.append(self.reply)
        self.reply = reply

    def _on_audio(self, event: Event) -> None:
        reply = self._reply_of(event["response_id"])
        if reply is None:
            return
        try:
            packet = binascii.a2b_base64(event["delta"], strict_mode=True)
        except binascii.Error as error:
            self.fail("error", f"audio packet is not base64: {error}")
            return
        if len(packet) % clip.BYTES_PER_SAMPLE:
            self.fail("error", f"audio packet of {len(packet)} bytes cuts a sample in two")
        elif packet:
            reply.item_id = event.get("item_id")
            reply.add_audio(packet, self._clock.now_s())

    def _on_transcript_delta(self, event: Event) -> None:
        reply = self._reply_of(event["response_id"])
        if reply is not None:
            if reply.first_text_s is None:
                reply.first_text_s = self._clock.now_s()
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
        return next((r for r in reversed(self.replies) if r.response_id == response_id), None)

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
    _OF_A_REPLY = frozenset({_on_audio, _on_transcript_delta, _on_response_done})
