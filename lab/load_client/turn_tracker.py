"""Turn tracker: makes one TurnRecord of the server's events.

In: user_finished, interrupted, interruption_began, on_event, fail. Out: is_over, record.
Owner: one TurnTracker per turn of a RealtimeClient. Does no I/O.
"""

import binascii
from typing import Any

from lab.load_client.response import Response
from sglang_live.client import clip
from sglang_live.client.playback_clock import PlaybackClock
from sglang_live.clock import Clock
from sglang_live.extensions.planner.simulation.turn_record import (
    BARGE_IN,
    FALSE_TRIGGER,
    MS_PER_S,
    TurnRecord,
)

Event = dict[str, Any]

# After a response that came too early or was interrupted, the server may still respond to the
# latest speech. If it does not begin to within this time, that response counts.
SETTLE_S = 2.0

# Errors about events of the client that came too late to have an effect; the turn goes on.
HARMLESS_ERRORS = frozenset(
    {"response_cancel_not_active", "conversation_already_has_active_response"}
)


class TurnTracker:
    """State of one turn.

    response: the one that the turn is measured by; None before its response.created.
    """

    def __init__(self, clock: Clock, kind: str, user_audio_s: float = 0.0):
        self._clock = clock
        self._kind = kind
        self._user_audio_s = user_audio_s
        self._finished_s: float | None = None
        self._speech_stopped_s: float | None = None
        self._speech_is_detected = False
        self._response_due = False
        self._n_early = 0
        self._user_transcript: str | None = None
        self._failure: tuple[str, str] | None = None
        self._interruption: str | None = None
        self._interrupted_s = 0.0
        self._onset_s: float | None = None
        self.response: Response | None = None
        # Responses that came too early, and responses to a noise.
        self._others: list[Response] = []

    @property
    def responses(self) -> list[Response]:
        return [*self._others, *([] if self.response is None else [self.response])]

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
        """The user makes a sound while the response plays.

        kind: `barge_in`, after which only events of the response itself count here, or
            `false_trigger`.
        """
        self._interruption = kind
        self._interrupted_s = self._clock.now_s()

    def interruption_began(self) -> None:
        """The first loud frame of that sound has been sent."""
        self._onset_s = self._clock.now_s()

    def until_interruption_s(self, after_s: float) -> float | None:
        """Time until the first packet is `after_s` old; None before that packet."""
        if self._finished_s is None or self.response is None or self.response.first_audio_s is None:
            return None
        return self.response.first_audio_s + after_s - self._clock.now_s()

    def fail(self, status: str, message: str) -> None:
        """End the turn with an error. Only the first call has an effect."""
        self._failure = self._failure or (status, message)

    def is_over(self) -> bool:
        if self._failure:
            return True
        response = self.response
        finished_s = self._finished_s
        if response is None or response.done_s is None or finished_s is None:
            return False
        if self._interruption is None:
            if response.created_s >= finished_s and response.status != "cancelled":
                return True
            quiet_s = self._clock.now_s() - max(response.done_s, finished_s)
        else:
            # The server may take the sound for a turn, and respond to it.
            if any(other.done_s is None for other in self._others):
                return False
            ends_s = [other.done_s for other in self._others if other.done_s is not None]
            quiet_s = self._clock.now_s() - max(self._interrupted_s, *ends_s, 0.0)
        return quiet_s >= SETTLE_S and not self._speech_is_detected and not self._response_due

    def on_event(self, event: Event) -> None:
        handler = self._HANDLERS.get(event["type"])
        if handler and not (self.barged and handler not in self._OF_A_RESPONSE):
            handler(self, event)

    def record(self) -> TurnRecord:
        response = self.response
        status, error = self._status()
        if response is None:
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
            ttfp_ms=self._since_speech_ms(response.first_audio_s),
            end_of_turn_ms=self._since_speech_ms(self._speech_stopped_s),
            audio_s=clip.duration_s(response.pcm),
            audio_packets=response.packets,
            generation_s=response.generation_s,
            ttft_ms=self._since_speech_ms(response.first_text_s) if response.text_only else None,
            heard_s=response.heard_s,
            heard_in_all_s=sum(one.heard_s for one in self.responses),
            chunks_due=response.playback.chunks_due,
            chunks_on_time=response.playback.chunks_on_time,
            interruption=self._interruption,
            truncated_ms=self._truncated_ms(),
            cut_short=response.status == "cancelled" or response.flushed_s is not None,
            stop_latency_ms=self._stop_latency_ms(response),
            silence_ms=self._since_onset_ms(response.flushed_s),
            gaps_ms=tuple(gap_s * MS_PER_S for gap_s in response.playback.gaps_s),
            gaps_over_100ms=response.playback.audible_gaps,
            transcript=response.transcript,
            user_transcript=self._user_transcript,
            early_replies=self._n_early,
            response_id=response.response_id,
            reply_pcm=bytes(response.pcm),
        )

    def _status(self) -> tuple[str, str | None]:
        if self._failure:
            return self._failure
        response = self.response
        assert response is not None, "the turn is not over"
        if self.barged and response.status is None:
            return "unstopped", "the interrupted response never ended"
        assert response.status is not None, "the turn is not over"
        output = response.transcript if response.text_only else response.pcm
        if response.status == "completed" and not output:
            return "empty", "the response completed without any audio"
        return response.status, response.error

    def _since_speech_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._finished_s is None:
            return None
        return (at_s - self._finished_s) * MS_PER_S

    def _since_onset_ms(self, at_s: float | None) -> float | None:
        if at_s is None or self._onset_s is None:
            return None
        return (at_s - self._onset_s) * MS_PER_S

    def _truncated_ms(self) -> float | None:
        if self._interruption is None or self.response is None:
            return None
        if self.response.first_audio_s is None:
            return None
        return (self._interrupted_s - self.response.first_audio_s) * MS_PER_S

    def _stop_latency_ms(self, response: Response) -> float | None:
        if not self.barged or self._onset_s is None:
            return None
        if response.done_s is not None and response.done_s < self._onset_s:
            return None
        latency_ms = self._since_onset_ms(response.last_audio_s)
        return None if latency_ms is None else max(0.0, latency_ms)

    def _on_speech_started(self, _event: Event) -> None:
        self._speech_is_detected = True

    def _on_speech_stopped(self, _event: Event) -> None:
        self._speech_is_detected = False
        self._response_due = True
        self._speech_stopped_s = self._clock.now_s()

    def _on_response_created(self, event: Event) -> None:
        # A later response replaces an earlier one: the server mistook a pause for the end of the
        # turn, or was interrupted.
        if self._finished_s is None:
            self._n_early += 1
        self._response_due = False
        response = Response(
            response_id=event["response"]["id"],
            created_s=self._clock.now_s(),
            playback=PlaybackClock(self._clock),
        )
        if self._interruption == FALSE_TRIGGER:
            self._others.append(response)
            return
        if self.response is not None:
            self._others.append(self.response)
        self.response = response

    def _on_audio(self, event: Event) -> None:
        response = self._response_of(event["response_id"])
        if response is None:
            return
        try:
            packet = binascii.a2b_base64(event["delta"], strict_mode=True)
        except binascii.Error as error:
            self.fail("error", f"audio packet is not base64: {error}")
            return
        if len(packet) % clip.BYTES_PER_SAMPLE:
            self.fail("error", f"audio packet of {len(packet)} bytes splits a sample")
        elif packet:
            response.item_id = event.get("item_id")
            response.add_audio(packet, self._clock.now_s())

    def _on_transcript_delta(self, event: Event) -> None:
        response = self._response_of(event["response_id"])
        if response is not None:
            if response.first_text_s is None:
                response.first_text_s = self._clock.now_s()
            response.transcript += event["delta"]
            response.text_only = event["type"] == "response.output_text.delta"

    def _on_response_done(self, event: Event) -> None:
        done = event["response"]
        response = self._response_of(done["id"])
        if response is None:
            return
        response.done_s = self._clock.now_s()
        response.status = done["status"]
        if response.status != "completed":
            details = done.get("status_details") or {}
            failure = details.get("error") or {}
            response.error = failure.get("message") or details.get("reason") or response.status

    def _on_user_transcript(self, event: Event) -> None:
        self._user_transcript = event["transcript"]

    def _on_error(self, event: Event) -> None:
        error = event["error"]
        if error.get("code") not in HARMLESS_ERRORS:
            self.fail("error", f"{error.get('code') or error['type']}: {error['message']}")

    def _response_of(self, response_id: str) -> Response | None:
        return next((r for r in reversed(self.responses) if r.response_id == response_id), None)

    _HANDLERS = {  # noqa: RUF012 (never changed)
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
    _OF_A_RESPONSE = frozenset({_on_audio, _on_transcript_delta, _on_response_done})
