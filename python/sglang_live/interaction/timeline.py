"""The events of one session, in order, for figures and post-mortems.

In: events with their times. Out: one JSON document per session.
Owner: one Timeline per session, filled by its monitor. Bounded: the first events are kept,
the others counted. Format of the document:

    {"session": id, "began_unix_s": wall clock at t_s 0, "events": [...], "dropped": n}

Every event is {"t_s": seconds since the session began, "event": name} with more keys:

    speech_suspected, speech_started   onset_t_s: onset of the voice, on the same axis
    speech_stopped                     reason: silence, verdict, client, no_audio, too_long, words
    echo, side_talk, other_voice       the microphone hears the agent, or another person, after a
                                       while without
    speech_dismissed                   decision: backchannel, noise; reason: short; or
                                       other_voice: far
    turn_committed
    response_created                   response
    first_audio                        response
    sent                               response, sent_s, heard_s, generated_s: totals of its audio;
                                       at most one in 200 ms, and one when everything was sent
    underrun                           response, silent_s: length of the gap that ends now
    playing, dry                       response, heard_s: playback goes on, or has no audio left
    ack                                response, acked_s, outcome, heard_s
    ack_timeout                        response: the client stopped sending acks
    client_left, client_returned       a resumable session has lost its socket, and has another
    held, released                     audio is kept in the gateway, and sent again
    barge_in                           response, heard_s, sent_s, generated_s
    stopped                            the same keys: the client cancelled the response
    truncated                          response, heard_s: the client truncated its item
    response_done                      response, status
    turn_result                        response, n_tokens, n_frames, spoken: output of its turn;
                                       marks: times within the turn (telemetry/trace.py)
    stream                             response, stage, buffered_s, what: "u0", "u1", "u2" or
                                       "unknown", its new class in that stage, or "paused",
                                       "resumed"
"""

import json
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MAX_EVENTS = 5000
# Steps of a turn; what comes many times in one is in the timeline alone.
_LOGGED = frozenset(
    {
        "speech_started",
        "speech_stopped",
        "turn_committed",
        "response_created",
        "first_audio",
        "response_done",
        "barge_in",
        "stopped",
        "truncated",
    }
)


class Timeline:
    def __init__(
        self, session_id: str, *, began_s: float, began_unix_s: float, keeps: bool = True
    ) -> None:
        """keeps: False: events are only logged, because the timeline will not be written."""
        self._session_id = session_id
        self._began_s = began_s
        self._began_unix_s = began_unix_s
        self._keeps = keeps
        self._events: list[dict[str, Any]] = []
        self._n_dropped = 0

    def add(self, event: str, at_s: float, **facts: Any) -> None:
        if event in _LOGGED:
            log.info(event + "".join(map(_field, facts.items())), *facts.values())
        if not self._keeps:
            return
        if len(self._events) >= MAX_EVENTS:
            self._n_dropped += 1
            return
        rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}
        self._events.append({"t_s": self.t_s(at_s), "event": event, **rounded})

    def t_s(self, at_s: float) -> float:
        return round(at_s - self._began_s, 3)

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self._session_id,
            "began_unix_s": round(self._began_unix_s, 3),
            "events": list(self._events),
            "dropped": self._n_dropped,
        }

    def write(self, folder: Path) -> Path:
        """Raises OSError if the folder cannot be written to."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._session_id}.json"
        try:
            path.write_text(json.dumps(self.to_json()) + "\n", "utf-8")
        except OSError:
            path.unlink(missing_ok=True)  # a partial document cannot be read
            raise
        return path


def _field(fact: tuple[str, Any]) -> str:
    """Its part of a log line's template."""
    name, value = fact
    return f" {name}=%.3f" if isinstance(value, float) else f" {name}=%s"
