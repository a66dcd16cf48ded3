"""What OtherVoices and BargeIn do with a speaker model, on a recording, without a session."""

from dataclasses import dataclass, field, replace

import numpy as np

from benchmark.turn_taking.components import (
    Hearing,
    decision_of,
    due_windows,
    outlast_ms,
    packets,
    without_echo,
)
from benchmark.turn_taking.timeline import Decision
from sglang_live.interaction.filters.side_talk import SideTalk
from sglang_live.interaction.filters.voice_filter import Heard
from sglang_live.interaction.filters.voiceprint import (
    HeardVoice,
    SpeakerModel,
    Voiceprint,
    parts_of,
)
from sglang_live.interaction.silero import WINDOW_SAMPLES
from sglang_live.interaction.vad import SpeechDetector, SpeechDismissed, VadSettings


@dataclass(eq=False)
class RememberedEmbeddings:
    """A SpeakerModel that computes the embeddings of each sound once."""

    model: SpeakerModel
    _known: dict[tuple, np.ndarray] = field(default_factory=dict)

    def embed(self, sounds, lengths=()) -> np.ndarray:
        key = (*(pcm.tobytes() for pcm in sounds), *lengths)
        if key not in self._known:
            self._known[key] = self.model.embed(sounds, lengths)
        return self._known[key]


@dataclass(eq=False)
class Listening:
    """A response is audible, and the user has had one turn.

    stricter: see HeardVoice.
    """

    hearing: Hearing
    model: SpeakerModel
    confirm_ms: int
    stricter: float = 0.0

    def __post_init__(self) -> None:
        settings = replace(VadSettings(), confirm_ms=self.confirm_ms)
        self._detector = SpeechDetector(self.hearing.scores, settings)
        self._detector.confirming = True
        self._user, self._voiceprint = SideTalk(), Voiceprint()
        self._voice = HeardVoice(self.stricter)
        self._would_start = False
        if self.hearing.earlier is not None:
            self._user.learn(self.hearing.earlier)
            parts, lengths = parts_of(self.hearing.earlier)
            if parts:
                self._voiceprint.learn(self.model.embed(parts, lengths))

    def decisions(self) -> list[Decision]:
        found: list[Decision] = []
        detector = self._detector
        for at_ms, packet in packets(self.hearing.pcm):
            detector.take(packet)
            while (due := detector.due()) is not None:
                [(scores, state)] = self.hearing.scores.score([due])
                heard = Heard(scores, 0, "")
                if not detector.speaking:
                    heard = self._of_the_user(scores)
                for event in detector.scored(heard.scores, state, heard.outlast_ms, heard.voice):
                    if isinstance(event, SpeechDismissed) and self._would_start:
                        found.append(Decision("stopped", at_ms))
                        self._would_start = False
                    elif each := decision_of(event, at_ms):
                        found.append(each)
        return found

    def _of_the_user(self, scores: np.ndarray) -> Heard:
        detector, least_ms = self._detector, 0
        threshold = detector.settings.threshold
        scores = without_echo(self.hearing, detector, scores)
        pcm = due_windows(self.hearing, detector, scores)
        speaker = self._compare(pcm, scores >= threshold)
        if speaker == "far":
            self._would_start = False
            return Heard(np.where(scores >= threshold, np.float32(0), scores), 0, "other_voice")
        if self._user.is_known and not self._voice.is_certain:
            scores = self._user.without_others(scores, threshold, pcm)
        if (scores >= threshold).any():
            needed_ms = max(self.confirm_ms, outlast_ms(self.hearing, detector, scores))
            waits_ms = self._voice.outlast_ms if self._voiceprint.is_known else 0
            self._would_start = waits_ms > needed_ms and self._voice.voiced_ms >= needed_ms
            least_ms = max(needed_ms, waits_ms)
        return Heard(scores, least_ms, "")

    def _compare(self, pcm: np.ndarray, is_voice: np.ndarray) -> str:
        if not self._voiceprint.is_known:
            return "unsure"
        self._voice.hear(pcm.reshape(-1, WINDOW_SAMPLES), is_voice)
        while (due := self._voice.due(self._voiceprint.longest)) is not None:
            [[embedding]] = self.model.embed([due])
            n_windows = len(due) // WINDOW_SAMPLES
            self._voice.compared(self._voiceprint.similarity(n_windows, embedding))
        return self._voice.state
