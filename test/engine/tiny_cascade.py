"""A cascade with a tiny random language model, and a recogniser and a voice that are fakes.

A talker may take the voice's place.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_live.core import OUTPUT_RATE_HZ
from sglang_live.models.cascade.family import OF_TALKER
from sglang_live.models.demo.build import build_tokenizer
from sglang_live.models.family import model_facts
from sglang_live.models.speech import Speech
from sglang_live.speakable.style import SpeechStyle

FAMILY, SPOKEN = "sglang_live.models.cascade.family", "sglang_live.models.cascade.spoken"
HEARD = "tell me more of it"


class FakeRecogniser:
    """Hears the same words in every clip; fails for one that is silent to its end."""

    def transcribe(self, pcm: np.ndarray) -> str:
        if len(pcm) > 48_000 and not pcm.any():
            raise RuntimeError("broken")
        return HEARD if pcm.any() else ""


class FakeVoice:
    sample_rate_hz, voices = OUTPUT_RATE_HZ, ("anna",)
    times_words = False
    style = SpeechStyle()

    def synthesise(self, text: str, voice: str) -> Speech:
        return Speech(pcm=np.zeros(480 * len(text), np.int16))


def load_recogniser(path: Path) -> FakeRecogniser:
    return FakeRecogniser()


def load_voice(path: Path) -> FakeVoice:
    return FakeVoice()


def build(path: Path, talker: Path | None = None) -> Path:
    """Returns the cascade's directory. Its model ends no response by itself.

    talker: a checkpoint of Qwen3-TTS that speaks, instead of the voice.
    """
    tokenizer = build_tokenizer(1024)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    llm, cascade = path / "llm", path / "cascade"
    cascade.mkdir(parents=True)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0.0
    model.save_pretrained(llm)
    tokenizer.save_pretrained(llm)
    settings = {"path": str(path)}
    speaks = {"voice": {"part": f"{__name__}:load_voice", **settings}, "voices": ["anna"]}
    if talker is not None:
        facts = model_facts(talker)
        speaks = {
            "talker": {
                "family": facts.family,
                "path": str(talker),
                **{name: getattr(facts, name) for name in OF_TALKER},
            },
            "voices": list(facts.voices),
        }
    (cascade / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Cascade"],
                "llm": str(llm),
                "recogniser": {"part": f"{__name__}:load_recogniser", **settings},
                **speaks,
            }
        )
    )
    return cascade
