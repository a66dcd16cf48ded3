"""Train the demo model from nothing: recordings, vocoder, talker, audio encoder, thinker.

    python -m training.demo --work DIR --out DIR [--from DIR] [--only STEP ...]

Each step caches its result in the work directory and is skipped while the result is there, so a
stopped training resumes. The same seed and thread count give the same model. With --from, the parts
of a checkpoint are used as they are, and only missing parts are trained.
"""

import argparse
import random
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from training.demo import recordings, world
from training.demo.acoustics import background_noise
from training.demo.checkpoint import PARTS, blank_model, complete, load_part, save_part
from training.demo.codec import CodecSettings, Recording, mel_error, train_codec
from training.demo.codes import Codebooks, whole_frames
from training.demo.conversations import TRANSCRIBE, Library, Writer
from training.demo.convolved import ConvolvedClips, convolve_clips, join_clips
from training.demo.distortion import WILD
from training.demo.hearing import Heard, HearingSettings, features, heard_in_rooms, train_hearing
from training.demo.schedule import Log, ResumableSteps, Shares
from training.demo.talker import SpokenResponse, TalkerInputs, TalkerSettings, train_talker
from training.demo.thinker import ThinkerSettings, train_thinker
from training.demo.unknown_sentences import unknown_sentences
from training.demo.voices import Cast, require_programs

SEED = 20260101
# Frames of silence around each answer: in the first ones, the talker reads the words to come.
LEAD_FRAMES, TAIL_FRAMES = 2, 2
N_GENERAL = 400
N_VOICES, N_UNKNOWN, N_EMPTY = 100, 14_000, 600
# Clips of speakers who continue to talk, and sentences in one, at most.
N_GOING_ON, MOST_JOINED = 2000, 5
# Convolved copies of each recording for the thinker: one undistorted, the others distorted.
N_CONVOLVED = 4

# The only classes that are unpickled from cached files.
CACHED = [Codebooks, ConvolvedClips, Heard]


class Training:
    """The parts of the model, each trained at its first use.

    given: a checkpoint whose parts are not trained again.
    """

    def __init__(self, work: Path, given: Path | None = None):
        self.work, self.given = work, given
        self.recordings = recordings.RecordingCache(work / "recordings")
        self.model, self.tokenizer = blank_model(_corpus())

    @cached_property
    def answers(self) -> list[recordings.Utterance]:
        return self.recordings.cached("answers", recordings.answers())

    @cached_property
    def general(self) -> list[recordings.Utterance]:
        return self.recordings.cached("general", recordings.general_speech(N_GENERAL, SEED))

    @cached_property
    def codebooks(self) -> Codebooks:
        def fit() -> Codebooks:
            said = [framed(s) for s in (*self.answers, *self.general)]
            return Codebooks.fit(said, SEED)

        return self._cached("codebooks", fit)

    @cached_property
    def heard(self) -> list[Heard]:
        def listen() -> list[Heard]:
            cast = Cast(random.Random(SEED))
            asked = self.recordings.cached(
                "asked", recordings.spoken_questions(N_VOICES, N_UNKNOWN, cast)
            )
            rng = np.random.default_rng(SEED)
            empty = [
                Heard("", features(background_noise(rng, rng.uniform(0.4, 4))).half())
                for _ in range(N_EMPTY)
            ]
            return heard_in_rooms(asked, SEED) + empty

        return self._cached("heard", listen)

    @cached_property
    def convolved(self) -> tuple[ConvolvedClips, ConvolvedClips]:
        """Convolved clips of all recordings, and of speakers who continue to talk."""

        def convolve() -> tuple[ConvolvedClips, ConvolvedClips]:
            tower, known = self.model.thinker.audio_tower, set(world.questions())
            strange = [h for h in self.heard if h.text not in known]
            going_on = join_clips(strange, N_GOING_ON, MOST_JOINED, SEED)
            return (
                convolve_clips(tower, self.heard, N_CONVOLVED, WILD, SEED),
                convolve_clips(tower, going_on, 2, WILD, SEED),
            )

        return self._cached("convolved", convolve)

    def part(self, name: str) -> None:
        """Load this part into the model; train it where no checkpoint has it."""
        if self.given is None or not load_part(self.model, name, self.given):
            {
                "vocoder": self._vocoder,
                "talker": self._talker,
                "hearing": self._hearing,
                "thinker": self._thinker,
            }[name]()

    def _vocoder(self) -> None:
        def train() -> dict:
            answers, general = (
                [self._recording(s) for s in said] for said in (self.answers, self.general)
            )
            codec = train_codec(
                self.model.config.code2wav_config, self.codebooks, answers + general,
                CodecSettings(), Log("vocoder"), self._resumable("vocoder"),
            )  # fmt: skip
            print(f"log-mel error of the answers: {mel_error(codec, answers):.3f} nat")
            return codec.state_dict()

        self.model.code2wav.load_state_dict(self._cached("vocoder", train))

    def _talker(self) -> None:
        def train() -> dict:
            responses = [
                SpokenResponse(self.ids(s.text), self.codebooks.encode(framed(s)).T.contiguous())
                for s in self.answers
            ]
            questions = [self.ids(q) for q in self._some_questions()]
            train_talker(
                self.model.talker, self.talker_inputs(),
                list(self.model.config.talker_config.speaker_id.values()),
                responses, questions, TalkerSettings(), Log("talker"), self._resumable("talker"),
            )  # fmt: skip
            return self.model.talker.state_dict()

        self.model.talker.load_state_dict(self._cached("talker", train))

    def _hearing(self) -> None:
        def train() -> dict:
            tower = self.model.thinker.audio_tower
            train_hearing(
                tower, self.model.thinker.model.embed_tokens, self.spelling, self.heard,
                HearingSettings(), Log("hearing"), self._resumable("hearing"),
            )  # fmt: skip
            return tower.state_dict()

        self.model.thinker.audio_tower.load_state_dict(self._cached("hearing", train))

    def _thinker(self) -> None:
        thinker = self.model.thinker

        def train() -> dict:
            self.part("hearing")
            settings, library = ThinkerSettings(), Library(*self.convolved)
            writers = [
                Writer(self.tokenizer, library, settings.style, SEED + share)
                for share in range(Shares.N)
            ]
            train_thinker(thinker, writers, settings, Log("thinker"), self._resumable("thinker"))
            return thinker.state_dict()

        thinker.load_state_dict(self._cached("thinker", train))

    def talker_inputs(self) -> TalkerInputs:
        newline_id = self.ids("\n")[0]
        embed_tokens = self.model.thinker.model.embed_tokens
        return TalkerInputs(self.model.talker, embed_tokens, self.model.config, newline_id)

    def _recording(self, said: recordings.Utterance) -> Recording:
        sound = framed(said)
        return Recording(torch.from_numpy(sound), self.codebooks.encode(sound))

    def _some_questions(self) -> list[str]:
        return world.questions() + list(islice(unknown_sentences(random.Random(SEED)), 300))

    def spelling(self, text: str) -> list[int]:
        return self.ids(f" {text}") if text else []

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _resumable(self, name: str) -> ResumableSteps:
        self.work.mkdir(parents=True, exist_ok=True)
        return ResumableSteps(self.work / f"{name}.resumable")

    def _cached(self, name: str, make):
        path = self.work / f"{name}.pt"
        if not path.exists():
            made = make()
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(made, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        with torch.serialization.safe_globals(CACHED):
            return torch.load(path, weights_only=True)


def framed(said: recordings.Utterance) -> np.ndarray:
    return whole_frames(said.sound, LEAD_FRAMES, TAIL_FRAMES)


def _corpus() -> str:
    """The text that the tokenizer is fitted to: words as they are typed and as they are spoken.

    Every word should be one token: the talker gets one token per frame, and cannot begin to speak
    a word before it has the whole of it. So the world's own sentences are repeated often.
    """
    own = [*world.questions(), *world.answers(), TRANSCRIBE]
    typed = [f"{line.capitalize()}?\n {line.lower()}\n{line}" for line in own]
    strange = [f" {line}" for line in islice(unknown_sentences(random.Random(SEED)), 4000)]
    return "\n".join(typed * 40 + strange)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="directory of cached steps")
    parser.add_argument("--out", type=Path, help="checkpoint directory")
    parser.add_argument("--from", dest="given", type=Path, help="checkpoint whose parts are used")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    require_programs()
    torch.set_num_threads(args.threads)
    training = Training(args.work, args.given)
    for name in args.only:
        training.part(name)
        if args.out:
            save_part(training.model, name, args.out)
    if args.out and "thinker" in args.only:
        save_part(training.model, "hearing", args.out)  # the thinker's training changes it too
    if args.out and all((args.out / f"{name}.safetensors").exists() for name in PARTS):
        complete(training.model, training.tokenizer, args.out)
        print(args.out)


if __name__ == "__main__":
    main()
