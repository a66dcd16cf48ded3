"""A model family outside the package, as docs/new_model.md describes: a small Llama that hears
loudness and speaks in beeps. Its checkpoint is that of the Llama, with "toy" in its config.json."""

from pathlib import Path

import numpy as np

from sglang_live.models.family import ModelFacts, read_json

RATE_HZ, BEEP_HZ, BEEP_S = 24_000, 1_000, 0.1


class Toy:
    thinker, recogniser, voice = (f"{__name__}:{name}" for name in ("Thinker", "Ears", "Beeps"))
    talker = decoder = None

    def claims(self, config):
        return config.get("toy") is True

    def facts(self, path: Path) -> ModelFacts:
        config = read_json(path / "config.json")
        return ModelFacts(
            path=path,
            weights=path,
            family=__name__,
            stages=("thinker", "vocoder"),
            voices=("beep",),
            vocab_size=config["vocab_size"],
            context_tokens=config["max_position_embeddings"],
        )

    def check_ranks(self, path: Path, stage: str, flag: str, n_ranks: int) -> None:
        """Any number of ranks may be tried."""


class Thinker:
    external_models, sampling, clip_form = "", {"temperature": 0.0}, None
    ears = voice = None

    def __init__(self, path: Path):
        pass

    def engine_args(self, cache_dir: Path):
        return {"enable_multimodal": False}

    def prompt(self, tokenizer):
        from sglang_live.models.cascade.parts import TemplatePrompt

        return TemplatePrompt(tokenizer, ())


class Ears:
    def __init__(self, path: Path):
        pass

    def transcribe(self, pcm) -> str:
        return "loud" if np.abs(pcm.astype(int)).max(initial=0) > 3_000 else "quiet"


class Beeps:
    """Each word is one beep."""

    sample_rate_hz, voices = RATE_HZ, ("beep",)
    times_words = False

    def __init__(self, path: Path):
        from sglang_live.speakable.style import SpeechStyle

        self.style = SpeechStyle()

    def synthesise(self, text: str, voice: str):
        from sglang_live.models.speech import Speech, SpokenWord

        n = round(BEEP_S * RATE_HZ)
        beep = (8_000 * np.sin(2 * np.pi * BEEP_HZ * np.arange(n) / RATE_HZ)).astype(np.int16)
        words, ends, at = text.split(), [], 0
        for word in words:
            at = text.index(word, at) + len(word)
            ends.append(at)
        spoken = tuple(SpokenWord(end, BEEP_S * (i + 1)) for i, end in enumerate(ends))
        return Speech(pcm=np.tile(beep, len(words)), words=spoken)


FAMILY = Toy()
