"""Speech synthesis: flite for answers; flite, espeak-ng and festival for questions.

They are command line programs of the system (`apt install flite espeak-ng festival
festvox-kdlpc16k`). The shipped voice is trained on flite's sound only; see docs/demo_model.md on
licences.
"""

import io
import random
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import soundfile
import soxr

ANSWER_RATE_HZ = 24_000
QUESTION_RATE_HZ = 16_000


@dataclass(frozen=True, slots=True)
class Voice:
    """A synthetic speaker.

    Attributes:
        program: `flite`, `espeak-ng` or `festival`.
        name: a voice of that program.
        speed: relative to the voice's own; 1.2 is a fifth faster.
        pitch: relative to the voice's own.
        shifts: sounds that are replaced, in espeak-ng's letters; for espeak-ng only.
    """

    program: str
    name: str
    speed: float = 1.0
    pitch: float = 1.0
    shifts: tuple[tuple[str, str], ...] = ()

    def say(self, text: str, rate_hz: int) -> np.ndarray:
        """Mono samples in [-1, 1], float32.

        Raises:
            RuntimeError: if the program is missing or fails.
        """
        make = {"flite": _flite, "espeak-ng": _espeak, "festival": _festival}[self.program]
        samples, own_rate_hz = make(self, text)
        return soxr.resample(samples, own_rate_hz, rate_hz).astype(np.float32)


# Made of recordings of a person; its pitch is low enough for the codec.
ANSWERING = Voice("flite", "rms")

_FLITE = ("slt", "rms", "awb", "kal16")
# Mean pitch of each in Hz, with its own prosody.
_FLITE_PITCH_HZ = {"slt": 170.0, "rms": 100.0, "awb": 110.0, "kal16": 105.0}
_HELD_OUT_FLITE = "kal16"
_HELD_OUT_ACCENTS = ("en-029", "en-gb-x-gbcwmd")
_HELD_OUT_SPEAKERS = ("m7", "m8", "f2", "f4", "klatt4")
_ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en")
# All of espeak-ng's other speakers except robots and whispers.
_SPEAKERS = (
    "", "m1", "m2", "m3", "m4", "m5", "m6", "f1", "f3", "f5", "croak", "klatt2",
    "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Gene2", "Henrique",
    "Hugo", "Jacky", "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "Storm", "adam",
    "anika", "announcer", "antonio", "aunty", "belinda", "benjamin", "boris", "caleb", "david",
    "ed", "edward", "edward2", "grandma", "grandpa", "gustave", "iven", "iven2", "iven3", "iven4",
    "john", "kaukovalta", "klatt", "klatt3", "klatt5", "klatt6", "linda", "marcelo", "max",
    "michel", "miguel", "norbert", "pablo", "paul", "pedro", "quincy", "rob", "robert", "sandro",
    "shelby", "steph", "steph2", "steph3", "travis", "victor", "zac",
)  # fmt: skip
# Replacements of English sounds between accents, in espeak-ng's letters.
_SHIFTS = {
    "I": ("i:", "@", "E"), "i:": ("I", "eI"), "i": ("I", "eI"), "E": ("I", "a", "eI"),
    "a": ("E", "A:"), "aa": ("a", "A:"), "A:": ("a", "O:"), "A@": ("a", "A:", "O:"),
    "0": ("A:", "O:", "a"), "O:": ("oU", "0", "A:"), "O@": ("O:", "oU"), "V": ("U", "a", "@"),
    "U": ("u:", "V"), "u:": ("U", "oU"), "3:": ("E", "0", "O:"), "3": ("@", "a"),
    "@": ("V", "E", "I"), "@2": ("V", "I"), "a#": ("@", "a"), "I2": ("@", "i:"),
    "eI": ("aI", "E", "i:"), "aI": ("OI", "A:", "eI"), "aI2": ("A:", "eI"), "OI": ("aI", "O:"),
    "oU": ("O:", "aU", "u:"), "aU": ("u:", "oU", "a"), "e@": ("E", "3:"), "i@": ("i:", "E"),
    "T": ("t", "f", "s"), "D": ("d", "v", "z"), "t": ("t#", "?"), "w": ("v",), "v": ("w", "f"),
    "r": ("w",), "z": ("s",), "dZ": ("Z", "tS"), "tS": ("S",), "N": ("n",), "S": ("s",),
    "l": ("w",), "p": ("b",), "k": ("g",), "d": ("t",),
}  # fmt: skip
_SHIFTED = 0.15  # share of the sounds that one accent replaces
_STRESS = "',%="
_FESTIVAL = "ked_diphone"
_FESTIVAL_PITCH_HZ = 105.0
_ESPEAK_WORDS_PER_MINUTE = 160
_ESPEAK_PITCH = 50


@dataclass(slots=True)
class Cast:
    """Random voices for questions, none of them held out.

    The programs have few accents, and a user may have another one. So most of espeak-ng's speakers
    get an artificial accent, with sounds replaced at random.
    """

    rng: random.Random
    flite_share: float = 0.2
    festival_share: float = 0.1
    shifted_share: float = 0.45

    def next(self) -> Voice:
        rng = self.rng
        speed, pitch = rng.uniform(0.75, 1.3), rng.uniform(0.65, 1.5)
        kind = rng.random()
        if kind < self.flite_share:
            names = [name for name in _FLITE if name != _HELD_OUT_FLITE]
            return Voice("flite", rng.choice(names), speed, pitch)
        kind -= self.flite_share
        if kind < self.festival_share:
            return Voice("festival", _FESTIVAL, speed, pitch)
        voice = _espeak_voice(rng, _SPEAKERS, _ACCENTS, speed, pitch)
        if kind < self.festival_share + self.shifted_share:
            voice = replace(voice, shifts=_random_shifts(rng))
        return voice


@dataclass(slots=True)
class HeldOutCast:
    """Voices that are not in training: other accents, other speakers, and one of flite's."""

    rng: random.Random
    flite_share: float = 0.3

    def next(self) -> Voice:
        rng = self.rng
        speed, pitch = rng.uniform(0.8, 1.25), rng.uniform(0.75, 1.35)
        if rng.random() < self.flite_share:
            return Voice("flite", rng.choice([_HELD_OUT_FLITE]), speed, pitch)
        return _espeak_voice(rng, _HELD_OUT_SPEAKERS, _HELD_OUT_ACCENTS, speed, pitch)


def _random_shifts(rng: random.Random) -> tuple[tuple[str, str], ...]:
    return tuple(
        (sound, rng.choice(others)) for sound, others in _SHIFTS.items() if rng.random() < _SHIFTED
    )


def _espeak_voice(
    rng: random.Random,
    speakers: tuple[str, ...],
    accents: tuple[str, ...],
    speed: float,
    pitch: float,
) -> Voice:
    speaker = rng.choice(speakers)
    name = rng.choice(accents) + (f"+{speaker}" if speaker else "")
    return Voice("espeak-ng", name, speed, pitch)


def require_programs() -> None:
    """Raise a RuntimeError that names the missing programs, if any."""
    missing = [n for n in ("flite", "espeak-ng", "text2wave") if shutil.which(n) is None]
    if missing:
        install = "apt install flite espeak-ng festival festvox-kdlpc16k"
        raise RuntimeError(f"not installed: {', '.join(missing)} ({install})")


def _flite(voice: Voice, text: str) -> tuple[np.ndarray, int]:
    with tempfile.TemporaryDirectory(prefix="voice-") as scratch:
        path = Path(scratch) / "said.wav"  # flite seeks to write the header
        _run(
            "flite", "-voice", voice.name,
            "--setf", f"duration_stretch={1 / voice.speed:.4f}",
            "--setf", f"int_f0_target_mean={_FLITE_PITCH_HZ[voice.name] * voice.pitch:.1f}",
            "-t", text, "-o", str(path),
        )  # fmt: skip
        return soundfile.read(path, dtype="float32")


def _espeak(voice: Voice, text: str) -> tuple[np.ndarray, int]:
    if voice.shifts:
        spelt = _run("espeak-ng", "-q", "-x", "--sep=_", "-v", voice.name, text).decode()
        text = f"[[{shifted(spelt, dict(voice.shifts))}]]"
    sound = _run(
        "espeak-ng", "-v", voice.name,
        "-s", str(round(_ESPEAK_WORDS_PER_MINUTE * voice.speed)),
        "-p", str(min(99, round(_ESPEAK_PITCH * voice.pitch))),
        "--stdout", text,
    )  # fmt: skip
    # The header of a stream has no length.
    samples = np.frombuffer(sound[44:], "<i2").astype(np.float32) / 32768
    return samples, soundfile.info(io.BytesIO(sound)).samplerate


def shifted(spelt: str, shifts: dict[str, str]) -> str:
    """Words in espeak-ng's letters, `_` between sounds, with the shifts applied."""

    def moved(sound: str) -> str:
        bare = sound.lstrip(_STRESS)
        return sound[: len(sound) - len(bare)] + shifts.get(bare, bare)

    return " ".join("|".join(map(moved, word.split("_"))) for word in spelt.split())


def _festival(voice: Voice, text: str) -> tuple[np.ndarray, int]:
    pitch_hz = _FESTIVAL_PITCH_HZ * voice.pitch
    settings = (
        f"(begin (voice_{voice.name}) (Parameter.set 'Duration_Stretch {1 / voice.speed:.4f})"
        f" (set! int_lr_params '((target_f0_mean {pitch_hz:.1f}) (target_f0_std 12)"
        " (model_f0_mean 170) (model_f0_std 34))))"
    )
    with tempfile.TemporaryDirectory(prefix="voice-") as scratch:
        path = Path(scratch) / "said.wav"
        _run("text2wave", "-eval", settings, "-o", str(path), said=text)
        return soundfile.read(path, dtype="float32")


def _run(*command: str, said: str = "") -> bytes:
    done = subprocess.run(command, input=said.encode(), capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
