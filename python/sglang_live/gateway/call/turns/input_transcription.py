"""Transcripts of the user's speech, for calls that have them.

In: committed items; before that, the parts of a turn that a recogniser has heard while its user
still speaks. Out: words, and their end.
Owner: one InputTranscription per connection; one task transcribes one item at a time. It waits
while a response has not sent any audio yet: the first audio is urgent, a transcript is not.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_live.aio import background
from sglang_live.core import AudioPart, HeardToken
from sglang_live.errors import LiveError
from sglang_live.gateway.call.conversation.items import MessageItem
from sglang_live.gateway.call.ports import TranscriptPort
from sglang_live.gateway.call.responses.speculation import Utterance
from sglang_live.gateway.errors import internal_error
from sglang_live.gateway.parts import GatewayParts
from sglang_live.gateway.transcribe import hints_of, transcribe
from sglang_live.interaction.silero import SpeechModel
from sglang_live.interaction.vad import SAMPLES_PER_MS
from sglang_live.orchestrator.sessions import VoiceSession

log = logging.getLogger(__name__)

# If turns come faster than they are transcribed, the oldest ones fail.
_MAX_WAITING = 8
_WIND_DOWN_S = 1.0

Settings = dict[str, Any]


@dataclass(eq=False)
class _Transcript:
    """The transcript of one item.

    settings: SessionConfig.transcripts.
    clips: the audio as a recogniser has heard it for the turn.
    rest: audio behind the clips, in which speech is to be found first. None: there is none.
    item, audio: None while the user speaks.
    begin: sample of the audio at which the clips begin.
    n_written: clips whose words were sent.
    deltas: words that were sent. tokens: of them, in detail.
    is_stuck: a clip failed while the user spoke. It is tried again when the item is committed.
    is_over: nothing more is sent.
    """

    item_id: str
    settings: Settings
    clips: tuple[AudioPart, ...] = ()
    rest: AudioPart | None = None
    item: MessageItem | None = None
    audio: AudioPart | None = None
    begin: int = 0
    n_written: int = 0
    deltas: list[str] = field(default_factory=list)
    tokens: list[HeardToken] = field(default_factory=list)
    is_admitted: bool = False
    is_stuck: bool = False
    is_over: bool = False

    @property
    def has_new(self) -> bool:
        return self.n_written < len(self.clips) and not self.is_stuck

    def commit(
        self, item: MessageItem, audio: AudioPart, heard: tuple[AudioPart, ...], begin: int
    ) -> None:
        """
        Args:
            heard: the clips of the whole turn; (): it was not divided into clips.
            begin: sample of the audio at which the clips begin.
        """
        self.item = item
        self.audio = audio
        self.begin = begin
        sizes = [clip.n_samples for clip in self.clips]
        if heard and [clip.n_samples for clip in heard[: len(sizes)]] == sizes:
            self.clips = heard
        elif not sizes:
            self.rest = audio
        elif len(rest := audio.pcm[begin + sum(sizes) :]):
            self.rest = AudioPart(rest)


@dataclass(eq=False)
class InputTranscription:
    """
    past_first_audio: cleared while a response has not sent any audio yet.
    admit: counts one more response; raises RateLimitError or DrainingError.
    """

    parts: GatewayParts
    session: VoiceSession
    port: TranscriptPort
    past_first_audio: asyncio.Event
    admit: Callable[[], object]
    _waiting: deque[_Transcript] = field(default_factory=deque)
    _growing: _Transcript | None = None  # of the item that is not committed yet
    _worker: asyncio.Task[None] | None = None

    def grow(self, item_id: str, clips: tuple[AudioPart, ...], settings: Settings | None) -> None:
        """Transcribe what a recogniser has heard of a turn so far.

        Args:
            clips: all of them, from the turn's beginning. They stay as they are.
            settings: SessionConfig.transcripts. None: there are none.
        """
        if settings is None or not clips:
            return
        if self._growing is None or self._growing.item_id != item_id:
            self._growing = _Transcript(item_id, settings)
        self._growing.clips = clips
        if self._growing.has_new:
            self._begin()

    def discard(self) -> None:
        """The turn is not committed: no words follow for its item."""
        if self._growing is not None:
            self._growing.is_over = True
        self._growing = None

    def add(
        self,
        item: MessageItem,
        audio: AudioPart,
        settings: Settings | None,
        utterance: Utterance = (),
        begin: int = 0,
    ) -> None:
        """Complete the transcript of a committed item.

        Args:
            settings: as for grow.
            utterance: the messages that a recogniser hears for the turn; (): one, of all the audio.
            begin: sample of the audio at which the utterance begins.
        """
        if settings is None:
            return self.discard()
        transcript, self._growing = self._growing, None
        if transcript is None or transcript.item_id != item.id:
            transcript = _Transcript(item.id, settings)
        parts = [part for message in utterance for part in message.parts]
        heard = tuple(part for part in parts if isinstance(part, AudioPart))
        transcript.commit(item, audio, heard, begin)
        if transcript.n_written == len(transcript.clips) and transcript.rest is None:
            return self._complete(transcript)
        self._waiting.append(transcript)
        if len(self._waiting) > _MAX_WAITING:
            oldest = self._waiting.popleft()
            self._failed(
                oldest, True, LiveError("Turns came faster than they could be transcribed.")
            )
        self._begin()

    async def close(self) -> None:
        self._waiting.clear()
        self.discard()
        if self._worker:
            self._worker.cancel()
            await asyncio.wait([self._worker], timeout=_WIND_DOWN_S)

    def _begin(self) -> None:
        if self._worker is None:
            self._worker = background(self._work(), "user transcripts")

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or (self._growing is not None and self._growing.has_new)

    async def _work(self) -> None:
        try:
            await self._work_through()
        finally:
            self._worker = None

    async def _work_through(self) -> None:
        while self._has_work:
            await self.past_first_audio.wait()
            transcript = self._waiting.popleft() if self._waiting else self._growing
            if transcript is None:
                continue
            is_committed = transcript.item is not None
            try:
                await self._transcribe(transcript, is_committed)
            except LiveError as error:
                log.warning("transcript_failed item=%s code=%s", transcript.item_id, error.code)
                self._failed(transcript, is_committed, error)
            except Exception:
                log.exception("transcript_crashed item=%s", transcript.item_id)
                self._failed(transcript, is_committed, internal_error())

    async def _transcribe(self, transcript: _Transcript, is_committed: bool) -> None:
        """Send the words of a growing turn's next clip, or all that is left of a committed one."""
        if not transcript.is_admitted:
            self.admit()
            transcript.is_admitted = True
        last = None if is_committed else transcript.n_written + 1
        if clips := transcript.clips[transcript.n_written : last]:
            before = sum(clip.n_samples for clip in transcript.clips[: transcript.n_written])
            await self._write(transcript, clips, None, transcript.begin + before)
            transcript.n_written += len(clips)
        if not is_committed:
            return
        if (rest := transcript.rest) is not None:
            assert transcript.audio is not None
            begin = transcript.audio.n_samples - rest.n_samples
            await self._write(transcript, (rest,), self.parts.speech_model, begin)
        self._complete(transcript)

    async def _write(
        self,
        transcript: _Transcript,
        clips: tuple[AudioPart, ...],
        speech_model: SpeechModel | None,
        begin: int,
    ) -> None:
        """begin: sample of the turn's audio at which the clips begin."""
        end = begin + sum(clip.n_samples for clip in clips)
        said_ms = begin / SAMPLES_PER_MS, end / SAMPLES_PER_MS
        language, hint = hints_of(transcript.settings)
        space = " " if transcript.deltas else ""
        output = transcribe(
            self.session,
            clips,
            speech_model,
            apart=self.parts.config.model.hears_one_utterance,
            language=language,
            hint=hint,
            in_detail=transcript.settings["in_detail"],
        )
        async for delta in output:
            if isinstance(delta, tuple):
                transcript.tokens += delta
            elif isinstance(delta, str) and not transcript.is_over:
                transcript.deltas.append(space + delta)
                self.port.words_heard(transcript.item_id, space + delta, *said_ms)
                space = ""

    def _complete(self, transcript: _Transcript) -> None:
        item, audio = transcript.item, transcript.audio
        assert item is not None and audio is not None
        if transcript.is_over:
            return
        transcript.is_over = True
        text = "".join(transcript.deltas).strip()
        item.transcribed(text)
        tokens = transcript.tokens if transcript.settings["in_detail"] else None
        self.port.transcript_completed(transcript.item_id, text, audio.duration_s, tokens)
        self.parts.metrics.transcripts.labels("completed").inc()

    def _failed(self, transcript: _Transcript, is_committed: bool, error: LiveError) -> None:
        if not is_committed:
            transcript.is_stuck = True
        elif not transcript.is_over:
            transcript.is_over = True
            self.port.transcript_failed(transcript.item_id, error)
            self.parts.metrics.transcripts.labels("failed").inc()
