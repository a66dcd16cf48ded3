"""The server's decisions on turns, on a recording, fed as the gateway feeds them.

The detector and the endpoint model are the server's own. Their networks' outputs are remembered per
recording, because most settings ask for the same ones. What TurnTaking and PauseJudge do between
them is repeated here without a session: packets of 20 ms, verdicts on each pause while the user is
still silent, and a detector that asks for confirmation while the agent speaks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmark.turn_taking.timeline import SAMPLES_PER_MS, Decision
from sglang_live.core import INPUT_RATE_HZ
from sglang_live.interaction.endpoint import MODEL_SAMPLES, EndpointModel
from sglang_live.interaction.filters.backchannels import OUTLAST_MS, begins_at, has_hiss
from sglang_live.interaction.filters.echo import (
    ECHO_WINDOW,
    LEAST_SHARE,
    MAX_DELAY_S,
    SPAN_S,
    halved,
    unexplained,
)
from sglang_live.interaction.filters.side_talk import SideTalk
from sglang_live.interaction.silero import (
    WINDOW_SAMPLES,
    SpeechModel,
    SpeechScores,
    SpeechState,
    SpeechWindows,
)
from sglang_live.interaction.turn_end import (
    PAUSE_MS,
    SCORED_AT_MS,
    cutoff_ms,
    judged,
    silence_ms,
    word_evidence,
)
from sglang_live.interaction.vad import (
    SpeechDetector,
    SpeechDismissed,
    SpeechEvent,
    SpeechPaused,
    SpeechStarted,
    SpeechStopped,
    SpeechSuspected,
    VadSettings,
)
from sglang_live.models.speech import Recogniser

PACKET_MS = 20
TUNED = "Smart Turn or silence"
WITH_WORDS = "semantic_vad with words"
# From a pause to the verdict on it: modelled, so that results do not depend on the machine's load.
VERDICT_MS = 50.0
# From a pause to the words before it, of which a second takes a recogniser 25 ms: modelled, too.
WORDS_MS = 100.0


class RememberedScores:
    """A SpeechModel for one recording, whose windows are always scored from its beginning.

    The state that a detector sees is the number of windows before it.
    """

    def __init__(self, model: SpeechModel) -> None:
        self._model = model
        self._state = model.initial_state()
        self._known = np.zeros(0, np.float32)

    def initial_state(self) -> SpeechState:
        return _position(0)

    def score(self, batch: Sequence[SpeechWindows]) -> list[SpeechScores]:
        return [self._score(windows, int(state.h[0])) for windows, state in batch]

    def _score(self, windows: np.ndarray, start: int) -> SpeechScores:
        end = start + len(windows)
        new = windows[len(self._known) - start :] if end > len(self._known) else windows[:0]
        if len(new):
            [(scores, self._state)] = self._model.score([(new, self._state)])
            self._known = np.concatenate((self._known, scores))
        return self._known[start:end], _position(end)


def _position(windows: int) -> SpeechState:
    return SpeechState(np.array([windows]), np.zeros(0))


@dataclass(eq=False)
class Hearing:
    """A recording with what the networks say of it.

    recogniser: None: words are not known.
    playing: [n] int16, what the agent plays at the same time; None: nothing.
    earlier: [n] int16, a turn of the session's user before; None: none.
    """

    pcm: np.ndarray
    scores: RememberedScores
    model: EndpointModel | None = None
    recogniser: Recogniser | None = None
    playing: np.ndarray | None = None
    earlier: np.ndarray | None = None
    _verdicts: dict[tuple[int, int], float] = field(default_factory=dict)
    _words: dict[tuple[int, int], str] = field(default_factory=dict)
    _shares: dict[int, np.ndarray] = field(default_factory=dict)

    def shares(self, end: int) -> np.ndarray:
        """Of the windows up to sample end: the share of energy that is not echo (EchoFilter)."""
        assert self.playing is not None
        if end not in self._shares:
            start = max(end - round(SPAN_S * INPUT_RATE_HZ), 0)
            earlier = start - round(MAX_DELAY_S * INPUT_RATE_HZ)
            before = np.zeros(max(-earlier, 0), np.int16)
            played = np.concatenate((before, self.playing[max(earlier, 0) : end]))
            heard = halved(self.pcm[start:end])
            self._shares[end] = unexplained(heard, halved(played), ECHO_WINDOW)
        return self._shares[end]

    def completeness(self, start: int, end: int) -> float:
        """The endpoint model's score of the turn from sample start to a pause at sample end."""
        assert self.model is not None
        key = max(start, end - MODEL_SAMPLES), end
        if key not in self._verdicts:
            self._verdicts[key] = self.model.completeness(self.pcm[key[0] : end])
        return self._verdicts[key]

    def words(self, start: int, end: int) -> str:
        """What a recogniser hears from sample start to a pause at sample end."""
        assert self.recogniser is not None
        if (start, end) not in self._words:
            self._words[start, end] = self.recogniser.transcribe(self.pcm[start:end])
        return self._words[start, end]


@dataclass(frozen=True, slots=True)
class EndRule:
    """A way to end turns.

    min_score: of the endpoint model, which ends the turn at once.
    cutoff_ms: what an end within a turn costs, of which interaction/turn_end.py makes the silence
        to wait for. None for both: silence alone.
    hears_words: the words before a pause count, too.
    """

    component: str
    setting: str
    settings: VadSettings
    min_score: float | None = None
    cutoff_ms: float | None = None
    hears_words: bool = False

    @property
    def judges(self) -> bool:
        """Whether the endpoint model scores pauses."""
        return self.min_score is not None or self.cutoff_ms is not None


def end_rules() -> list[EndRule]:
    """What is measured: each component over its own parameter."""
    rules = [*silence_rules(), *smart_turn_rules(), *semantic_rules(), *tuned_rules()]
    return [*rules, *(_with_words(rule) for rule in semantic_rules())]


def silence_rules() -> list[EndRule]:
    lengths_ms = (200, 300, 400, 500, 600, 700, 850, 1000, 1200, 1500, 1800, 2200, 2600, 3000)
    return [
        EndRule("server_vad", f"{ms} ms", VadSettings(silence_duration_ms=ms)) for ms in lengths_ms
    ]


def smart_turn_rules() -> list[EndRule]:
    """The stock model over its threshold, without which four seconds of silence end the turn."""
    least = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99)
    settings = VadSettings(silence_duration_ms=4000, pause_ms=PAUSE_MS)
    return [EndRule("Smart Turn", f"{score:g}", settings, score) for score in least]


def semantic_rules() -> list[EndRule]:
    """Its eagernesses, and the curve that they lie on."""
    costs_ms = (100, 300, 400, 500, 600, 700, 850, 1000, 1200, 1500, 2000, 3000, 5000, 8000)
    own = [(name, cutoff_ms(name)) for name in ("high", "medium", "low")]
    return [_semantic(name, cost) for name, cost in (*own, *((f"{c} ms", c) for c in costs_ms))]


def _with_words(rule: EndRule) -> EndRule:
    return replace(rule, component=WITH_WORDS, hears_words=True)


def tuned_rules() -> list[EndRule]:
    """The stock model over its threshold and the silence that ends a turn without it."""
    return [
        EndRule(
            TUNED,
            f"{score:g}, {ms} ms",
            VadSettings(silence_duration_ms=ms, pause_ms=PAUSE_MS),
            score,
        )
        for score in (0.5, 0.8, 0.9, 0.95, 0.98, 0.985, 0.99, 0.995)
        for ms in (800, 1200, 1600, 2000, 2500)
    ]


def _semantic(setting: str, cost_ms: float) -> EndRule:
    settings = VadSettings(silence_duration_ms=silence_ms(cost_ms), pause_ms=PAUSE_MS)
    return EndRule("semantic_vad", setting, settings, cutoff_ms=cost_ms)


def hear_ends(hearing: Hearing, rule: EndRule) -> list[Decision]:
    """Every end of a turn that the rule decides in the recording."""
    detector = SpeechDetector(hearing.scores, rule.settings)
    decisions: list[Decision] = []
    turn_start = 0
    judged_pause: _JudgedPause | None = None  # the latest
    for at_ms, packet in packets(hearing.pcm):
        for known_ms, wait_ms in judged_pause.known(at_ms) if judged_pause is not None else ():
            assert judged_pause is not None
            if wait_ms is not None and detector.wait(judged_pause.pause, wait_ms):
                decisions.append(Decision("ended", known_ms))
        for event in detector.feed(packet):
            match event:
                case SpeechStarted():
                    turn_start = event.at_ms * SAMPLES_PER_MS
                case SpeechPaused() if rule.judges:
                    judged_pause = _JudgedPause(hearing, rule, event, turn_start)
                    judged_pause.hear_words(at_ms)
                    judged_pause.grow(at_ms, event.at_ms - event.speech_end_ms)
                case SpeechStopped():
                    decisions.append(Decision("ended", at_ms))
        if judged_pause is not None and detector.is_in(judged_pause.pause):
            judged_pause.grow(at_ms, detector.silence_ms)
    return decisions


@dataclass(eq=False)
class _JudgedPause:
    """A pause, and when what is known of it: a score, or the evidence of words."""

    hearing: Hearing
    rule: EndRule
    pause: SpeechPaused
    turn_start: int
    _score: float | None = None
    _words: float = 0.0
    _n_scored: int = 0
    _score_due: tuple[float, float] | None = None
    _words_due: tuple[float, float] | None = None

    def grow(self, at_ms: float, silence_ms: int) -> None:
        """As PauseJudge.grow. A rule with a least score has one score."""
        times_ms = SCORED_AT_MS if self.rule.cutoff_ms is not None else SCORED_AT_MS[:1]
        n_due = sum(silence_ms >= each for each in times_ms)
        if n_due <= self._n_scored or self._score_due is not None:
            return
        end = (self.pause.speech_end_ms + silence_ms) * SAMPLES_PER_MS
        self._n_scored = n_due
        self._score_due = at_ms + VERDICT_MS, self.hearing.completeness(self.turn_start, end)

    def hear_words(self, at_ms: float) -> None:
        if self.rule.hears_words:
            end = self.pause.at_ms * SAMPLES_PER_MS
            self._words_due = (
                at_ms + WORDS_MS,
                word_evidence(self.hearing.words(self.turn_start, end)),
            )

    def known(self, at_ms: float) -> Iterator[tuple[float, int | None]]:
        """What has become known by then: when, and the silence that ends the turn (_wait_ms)."""
        if self._score_due is not None and at_ms >= self._score_due[0]:
            (known_ms, score), self._score_due = self._score_due, None
            self._score = score if self._score is None else min(self._score, score)
            yield known_ms, self._wait_ms(self._score)
        if self._words_due is not None and at_ms >= self._words_due[0]:
            (known_ms, self._words), self._words_due = self._words_due, None
            if self._score is not None and self._words:
                yield known_ms, self._wait_ms(self._score)

    def _wait_ms(self, score: float) -> int | None:
        """None: the silence of the rule's settings."""
        if self.rule.cutoff_ms is not None:
            return judged(score, self.rule.cutoff_ms, self._words).wait_ms
        least = self.rule.min_score
        return 0 if least is not None and score >= least else None


def hear_interruptions(hearing: Hearing, confirm_ms: int, ignores: bool) -> list[Decision]:
    """What barge-in does while the agent speaks through the whole recording.

    Args:
        ignores: whether echo, back-channels and side talk are ignored, as by default.
    """
    detector = SpeechDetector(hearing.scores, replace(VadSettings(), confirm_ms=confirm_ms))
    detector.confirming = True
    user = SideTalk()
    if hearing.earlier is not None:
        user.learn(hearing.earlier)
    decisions: list[Decision] = []
    for at_ms, packet in packets(hearing.pcm):
        detector.take(packet)
        while (due := detector.due()) is not None:
            [(scores, state)] = hearing.scores.score([due])
            least_ms = 0
            if ignores and not detector.speaking:
                scores = _own_voice(hearing, user, detector, scores)
                least_ms = outlast_ms(hearing, detector, scores)
            found = detector.scored(scores, state, least_ms)
            decisions += [each for event in found if (each := decision_of(event, at_ms))]
    return decisions


def _own_voice(
    hearing: Hearing, user: SideTalk, detector: SpeechDetector, scores: np.ndarray
) -> np.ndarray:
    """As EchoFilter and SideTalk filter scores."""
    scores = without_echo(hearing, detector, scores)
    if not user.is_known:
        return scores
    pcm = due_windows(hearing, detector, scores)
    return user.without_others(scores, detector.settings.threshold, pcm)


def without_echo(hearing: Hearing, detector: SpeechDetector, scores: np.ndarray) -> np.ndarray:
    """As EchoFilter filters scores."""
    scores = scores.copy()
    if hearing.playing is not None and (scores >= detector.settings.threshold).any():
        is_voice = hearing.shares(detector.due_end)[-len(scores) :] >= LEAST_SHARE
        scores[-len(is_voice) :] = np.where(is_voice, scores[-len(is_voice) :], 0)
    return scores


def due_windows(hearing: Hearing, detector: SpeechDetector, scores: np.ndarray) -> np.ndarray:
    """Audio of the windows that are being scored."""
    end = detector.due_end
    return hearing.pcm[end - len(scores) * WINDOW_SAMPLES : end]


def outlast_ms(hearing: Hearing, detector: SpeechDetector, scores: np.ndarray) -> int:
    voiced = scores >= detector.settings.threshold
    if not voiced.any():
        return 0
    onset = detector.onset_sample
    if onset is None:
        onset = detector.due_end - (len(scores) - int(voiced.argmax())) * WINDOW_SAMPLES
    heard = hearing.pcm[max(begins_at(onset), 0) : detector.due_end]
    return 0 if has_hiss(heard) else OUTLAST_MS


def decision_of(event: SpeechEvent, at_ms: float) -> Decision | None:
    match event:
        case SpeechSuspected():
            return Decision("held", at_ms)
        case SpeechDismissed():
            return Decision("released", at_ms)
        case SpeechStarted():
            return Decision("stopped", at_ms)
    return None


def packets(pcm: np.ndarray):
    """Audio as a client sends it, with the time at which each packet is complete."""
    size = PACKET_MS * SAMPLES_PER_MS
    for start in range(0, len(pcm) - size + 1, size):
        yield float(start // SAMPLES_PER_MS + PACKET_MS), pcm[start : start + size]
