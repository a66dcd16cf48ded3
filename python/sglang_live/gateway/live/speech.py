"""What a call says, on its way to the ticks of a Live session.

In: audio and text of responses, as they are made. Out: exactly as much as a tick has, with silence
where there is nothing to say.
Owner: one Speech per session. It is the lanes of its call: held audio is silence, and what is
discarded was never said. Words leave with their audio.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from sglang_live.gateway.audio.codec import WireFormat
from sglang_live.gateway.call.conversation.assistant_item import AssistantItem
from sglang_live.gateway.call.responses.writer import ResponseWriter
from sglang_live.gateway.live.voice import Spoken


@dataclass(eq=False, slots=True)
class _Utterance:
    """
    frames: audio that was not taken yet.
    n_taken: bytes that were. n_said: characters of the text that were.
    is_whole: no more audio will come.
    """

    writer: ResponseWriter
    item: AssistantItem
    frames: deque[bytes] = field(default_factory=deque)
    n_taken: int = 0
    n_said: int = 0
    is_whole: bool = False

    def take(self, most: int) -> bytes:
        """The next bytes, at most this number."""
        taken = bytearray()
        while self.frames and len(taken) < most:
            frame = self.frames.popleft()
            n = most - len(taken)
            taken += frame[:n]
            if frame[n:]:
                self.frames.appendleft(frame[n:])
        self.n_taken += len(taken)
        return bytes(taken)

    def new_text(self) -> str:
        """The text that was said since the last call."""
        if self.is_whole and not self.frames and self.writer.status in ("completed", "incomplete"):
            said = self.item.text
        else:
            said = self.item.said_by(self.item.audio_format.duration_ms(self.n_taken))
        text, self.n_said = said[self.n_said :], max(self.n_said, len(said))
        return text


class Speech:
    def __init__(self, form: WireFormat):
        self._form = form
        self._utterances: deque[_Utterance] = deque()
        self._has_spoken = False
        self._held: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether there is audio that was not taken."""
        return any(utterance.frames for utterance in self._utterances)

    def open(self, writer: ResponseWriter, item: AssistantItem) -> None:
        self._utterances.append(_Utterance(writer, item))

    def add(self, lane: str, frame: bytes) -> None:
        for utterance in self._of(lane):
            utterance.frames.append(frame)

    def close(self, lane: str) -> None:
        """The response makes no more audio."""
        for utterance in self._of(lane):
            utterance.is_whole = True

    def hold(self, lane: str) -> None:
        self._held.add(lane)

    def release(self, lane: str) -> None:
        self._held.discard(lane)

    def discard_audio(self, lane: str) -> float:
        n_bytes = sum(len(frame) for u in self._of(lane) for frame in u.frames)
        self._utterances = deque(u for u in self._utterances if u.writer.id != lane)
        return self._form.duration_ms(n_bytes) / 1000

    def take(self, n_bytes: int) -> Spoken:
        audio, text = bytearray(), ""
        sent: list[Callable[[], None]] = []
        while self._utterances and len(audio) < n_bytes:
            utterance = self._utterances[0]
            if utterance.writer.id in self._held:
                break
            if piece := utterance.take(n_bytes - len(audio)):
                audio += piece
                sent.append(partial(utterance.writer.audio_sent, piece))
            text += self._new_text_of(utterance)
            if utterance.frames or not utterance.is_whole:
                break
            self._utterances.popleft()
        is_silence = not audio
        silence = self._form.silence
        audio += silence * ((n_bytes - len(audio)) // len(silence))
        return Spoken(bytes(audio), is_silence, text, partial(_call_all, sent))

    def _new_text_of(self, utterance: _Utterance) -> str:
        is_first = not utterance.n_said
        text = utterance.new_text()
        if text and is_first:
            # Clients join the fragments of a session as they are.
            text = (" " if self._has_spoken and not text[0].isspace() else "") + text
            self._has_spoken = True
        return text

    def _of(self, lane: str) -> list[_Utterance]:
        return [each for each in self._utterances if each.writer.id == lane]


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
